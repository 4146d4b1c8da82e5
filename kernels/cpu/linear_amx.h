// y = x W^T + b for bf16 on the matrix unit: tiles of 16 rows x 32 inputs against 32 inputs x 16 outputs.
//
// Weights are packed once in the order in which tiles are loaded: for each panel of 16 outputs one tile of 1 KiB after the other
// along the inputs, inputs in pairs (padded with zeros to 32). Rows are padded to 16, every output adds its pairs of inputs in
// order from zero: a row's result does not depend on the rows beside it. It has other bits than the kernels without AMX.
#pragma once

#include "amx.h"

#if BATON_AMX

#include "linear_parts.h"
#include "team.h"

namespace baton {

constexpr int64_t kTileInputs = 32;
constexpr int64_t kAmxRows = 16;

inline int64_t amx_inputs(int64_t num_inputs) { return (num_inputs + kTileInputs - 1) / kTileInputs * kTileInputs; }

// Where the weight of output n (of a panel) and input k lies in a packed panel.
inline int64_t amx_place(int64_t n, int64_t k) {
  return k / kTileInputs * kTileInputs * kPanel + k % kTileInputs / 2 * 2 * kPanel + 2 * n + k % 2;
}

// One or two row tiles against one or two panels; `sums` [32, 32] gets the results of the tiles there are.
template <int kRowTiles, int kPanels>
void amx_tile(const bf16* x, const bf16* weights, int64_t inputs, float* sums) {
  const int64_t x_stride = inputs * int64_t(sizeof(bf16)), sums_stride = 2 * kPanel * int64_t(sizeof(float));
  const bf16 *x1 = x + kAmxRows * inputs, *weights1 = weights + kPanel * inputs;
  AMX_ZERO(0);
  if constexpr (kPanels == 2) AMX_ZERO(1);
  if constexpr (kRowTiles == 2) AMX_ZERO(2);
  if constexpr (kRowTiles == 2 && kPanels == 2) AMX_ZERO(3);
  for (int64_t k = 0; k < inputs; k += kTileInputs) {
    for (int64_t line = 0; line < kPanel; ++line) {
      prefetch_far(weights + (k + 4 * kTileInputs) * kPanel + line * 32);
      if constexpr (kPanels == 2) prefetch_far(weights1 + (k + 4 * kTileInputs) * kPanel + line * 32);
    }
    AMX_LOAD(4, x + k, x_stride);
    AMX_LOAD(6, weights + k * kPanel, 64);
    AMX_DOT(0, 4, 6);
    if constexpr (kPanels == 2) {
      AMX_LOAD(7, weights1 + k * kPanel, 64);
      AMX_DOT(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      AMX_LOAD(5, x1 + k, x_stride);
      AMX_DOT(2, 5, 6);
      if constexpr (kPanels == 2) AMX_DOT(3, 5, 7);
    }
  }
  AMX_STORE(0, sums, sums_stride);
  if constexpr (kPanels == 2) AMX_STORE(1, sums + kPanel, sums_stride);
  if constexpr (kRowTiles == 2) AMX_STORE(2, sums + kAmxRows * 2 * kPanel, sums_stride);
  if constexpr (kRowTiles == 2 && kPanels == 2) AMX_STORE(3, sums + kAmxRows * 2 * kPanel + kPanel, sums_stride);
}

// As linear in linear.h. `work` holds linear_work(rows, num_inputs) floats.
template <typename X, typename Y>
void linear_amx(Crew& crew, const X* x, int64_t rows, const Linear<bf16>& w, Rounding rounding, Y* y, float* work) {
  const int64_t k = w.num_inputs, inputs = amx_inputs(k), num_panels = w.num_panels();
  const int64_t row_tiles = (rows + kAmxRows - 1) / kAmxRows;
  bf16* padded = reinterpret_cast<bf16*>(work);
  crew.each(row_tiles, [&](int64_t tile) {
    for (int64_t row = tile * kAmxRows; row < (tile + 1) * kAmxRows; ++row) {
      bf16* to = padded + row * inputs;
      if (row < rows) convert_row<bf16>(x + row * k, to, k);
      std::fill(to + (row < rows ? k : 0), to + inputs, bf16(0));
    }
  });
  // A unit is a run of panel pairs for a block of rows whose inputs stay in the second cache.
  const int64_t pairs = (num_panels + 1) / 2;
  const int64_t block_tiles = std::max<int64_t>(2, kBlockBytes / 2 / (kAmxRows * inputs) / 2 * 2);
  const int64_t num_blocks = (row_tiles + block_tiles - 1) / block_tiles;
  const int64_t num_runs = std::min<int64_t>(pairs, crew.size * kRunsPerThread);
  crew.each(num_blocks * num_runs, [&](int64_t unit) {
    const int64_t block = unit / num_runs, run = unit % num_runs;
    const int64_t end = std::min(row_tiles, (block + 1) * block_tiles);
    alignas(64) float sums[2 * kAmxRows * 2 * kPanel];
    amx_begin();
    for (int64_t pair = pairs * run / num_runs; pair < pairs * (run + 1) / num_runs; ++pair) {
      const int64_t n = pair * 2 * kPanel;
      const bool is_pair = 2 * pair + 1 < num_panels;
      for (int64_t tile = block * block_tiles; tile < end; tile += 2) {
        const bool has_two = tile + 1 < end;
        const auto compute = has_two ? (is_pair ? amx_tile<2, 2> : amx_tile<2, 1>) : (is_pair ? amx_tile<1, 2> : amx_tile<1, 1>);
        compute(padded + tile * kAmxRows * inputs, w.weight + n * inputs, inputs, sums);
        const int64_t first = tile * kAmxRows, last = std::min(rows, first + (has_two ? 2 : 1) * kAmxRows);
        for (int64_t row = first; row < last; ++row)
          put_outputs(sums + (row - first) * 2 * kPanel, w.bias ? w.bias + n : nullptr, std::min(2 * kPanel, w.num_outputs - n), rounding,
                      y + row * w.num_outputs + n);
      }
    }
    amx_end();
  });
}

}  // namespace baton

#endif
