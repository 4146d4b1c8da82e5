// y = x W^T + b with packed weights: panels of 16 outputs, inside a panel the 16 weights of one input lie together.
//
// Each output accumulates over its inputs strictly in order in one fp32 FMA chain that starts at 0; bias and rounding come
// last. Tiling over rows, panels and threads only decides who computes an output, never how, so a row's result is the same bits
// alone, in any batch and on any number of threads. A panel is streamed from memory once per block of rows.
#pragma once

#include "linear_amx.h"
#include "linear_parts.h"
#include "team.h"

#include <type_traits>

namespace baton {

#if BATON_AVX512
constexpr int kTileRows = 12;               // sums in 12 of 32 registers
#else
constexpr int kTileRows = 6;                // sums in 12 of 16 registers, 2 for weights, 1 for an input
#endif
constexpr int64_t kAheadBytes = 2048;       // how far a single pass over the weights asks the memory ahead

// How rows are cut: blocks of nearly equal height whose inputs stay in the cache, cut into tiles of nearly equal height.
struct RowTiling {
  int64_t rows, num_blocks, block_rows;
  RowTiling(int64_t rows, int64_t num_inputs) : rows(rows) {
    const int64_t rows_max = std::max<int64_t>(4 * kTileRows, kBlockBytes / 4 / std::max<int64_t>(1, num_inputs));
    num_blocks = (rows + rows_max - 1) / rows_max;
    const int64_t even = (rows + num_blocks - 1) / num_blocks;
    block_rows = (even + kTileRows - 1) / kTileRows * kTileRows;
    num_blocks = (rows + block_rows - 1) / block_rows;
  }
  int64_t block_start(int64_t block) const { return block * block_rows; }
  int64_t rows_in(int64_t block) const { return std::min(block_rows, rows - block * block_rows); }
  int64_t tiles_in(int64_t block) const { return (rows_in(block) + kTileRows - 1) / kTileRows; }
  int64_t tile_start(int64_t block, int64_t tile) const { return block_start(block) + tile * rows_in(block) / tiles_in(block); }
};

// R rows against P neighbouring panels into out [R, P * 16]; x holds the rows interleaved: x[k * R + r]. While it computes it
// asks the memory for what is needed next: a line of each of P streams of weights from `ahead` on, `step` bytes per input.
// (Kept this plain on purpose: with more than one input per turn the compiler no longer keeps the sums in registers.)
template <typename T, int R, int P>
void tile(const float* x, const T* weights, int64_t num_inputs, const char* ahead, int64_t step, float* out) {
  F16 sums[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sums[r][p] = zero16();
  for (int64_t k = 0; k < num_inputs; ++k) {
    for (int p = 0; p < P; ++p) {
      prefetch_far(ahead + p * num_inputs * kPanel * int64_t(sizeof(T)));
      const F16 weight = load_weights16(weights + (p * num_inputs + k) * kPanel);
      for (int r = 0; r < R; ++r) sums[r][p] = fma16(splat16(x[k * R + r]), weight, sums[r][p]);
    }
    ahead += step;
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store_sums16(out + (r * P + p) * kPanel, sums[r][p], weights);
}

// Panels that a tile of `rows` takes together: with few rows several, so that enough sums are in flight.
inline int64_t panels_together(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// The tile of `rows` rows, at most R.
template <typename T, int R>
void any_tile(int rows, bool is_group, const float* x, const T* weights, int64_t num_inputs, const char* ahead, int64_t step, float* out) {
  if (rows == R) return (is_group ? tile<T, R, R == 1 ? 4 : R == 2 ? 2 : 1> : tile<T, R, 1>)(x, weights, num_inputs, ahead, step, out);
  if constexpr (R > 1) any_tile<T, R - 1>(rows, is_group, x, weights, num_inputs, ahead, step, out);
}

// Rows of x [rows, num_inputs] (as T, or values of T widened to fp32) in the order in which tiles read them.
template <typename E>
void interleave(const E* x, int64_t rows, int64_t num_inputs, float* out) {
  if (rows == kTileRows) {  // the usual height, with strides that the compiler knows
    for (int64_t k = 0; k < num_inputs; ++k)
      for (int64_t r = 0; r < kTileRows; ++r) out[k * kTileRows + r] = widen(x[r * num_inputs + k]);
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < num_inputs; ++k) out[k * rows + r] = widen(x[r * num_inputs + k]);
}

// x [rows, num_inputs] as T or widened; y [rows, num_outputs] as T or widened. `work` holds linear_work(rows, num_inputs) floats.
template <typename T, typename X, typename Y>
void linear(Crew& crew, const X* x, int64_t rows, const Linear<T>& w, Rounding rounding, Y* y, float* work) {
  if (rows == 0 || w.num_outputs == 0) return;
#if BATON_AMX
  if constexpr (std::is_same_v<T, bf16>) return linear_amx(crew, x, rows, w, rounding, y, work);
#endif
  const int64_t k = w.num_inputs, num_panels = w.num_panels();
  const RowTiling tiling(rows, k);
  const float* inputs = work;
  if constexpr (sizeof(X) == sizeof(float)) {
    if (rows == 1) inputs = reinterpret_cast<const float*>(x);  // one row is its own interleaving
  }
  if (inputs == work) {
    int64_t num_tiles = 0;
    for (int64_t block = 0; block < tiling.num_blocks; ++block) num_tiles += tiling.tiles_in(block);
    const int64_t tiles_per_block = tiling.tiles_in(0);
    crew.each(num_tiles, [&](int64_t unit) {
      const int64_t block = unit / tiles_per_block, tile = unit % tiles_per_block;
      const int64_t row = tiling.tile_start(block, tile);
      interleave(x + row * k, tiling.tile_start(block, tile + 1) - row, k, work + row * k);
    });
  }
  const int64_t width = panels_together(rows), groups = (num_panels + width - 1) / width;
  const int64_t num_runs = std::min<int64_t>(groups, crew.size * kRunsPerThread);
  crew.each(tiling.num_blocks * num_runs, [&](int64_t unit) {
    const int64_t block = unit / num_runs, run = unit % num_runs, num_tiles = tiling.tiles_in(block);
    const int64_t end = std::min(num_panels, groups * (run + 1) / num_runs * width);
    const int64_t panel_bytes = k * kPanel * int64_t(sizeof(T)), input_bytes = kPanel * int64_t(sizeof(T));
    float sums[kTileRows * kPanel];
    for (int64_t panel = groups * run / num_runs * width, together; panel < end; panel += together) {
      together = panel + width <= end ? width : 1;
      const T* weights = w.weight + panel * k * kPanel;
      const char* bytes = reinterpret_cast<const char*>(weights);
      const int64_t n = panel * kPanel;
      for (int64_t i = 0; i < num_tiles; ++i) {
        // A single pass reads ahead of itself. Of several passes over a panel each brings in its share of the next panel.
        const char* ahead = num_tiles == 1 ? bytes + kAheadBytes : bytes + together * panel_bytes + panel_bytes * i / num_tiles;
        const int64_t step = num_tiles == 1 ? input_bytes : input_bytes / num_tiles;
        const int64_t row = tiling.tile_start(block, i), tile_rows = tiling.tile_start(block, i + 1) - row;
        any_tile<T, kTileRows>(int(tile_rows), together > 1, inputs + row * k, weights, k, ahead, step, sums);
        for (int64_t r = 0; r < tile_rows; ++r)
          put_outputs(sums + r * together * kPanel, w.bias ? w.bias + n : nullptr, std::min(together * kPanel, w.num_outputs - n), rounding,
                      y + (row + r) * w.num_outputs + n);
      }
    }
  });
}

}  // namespace baton
