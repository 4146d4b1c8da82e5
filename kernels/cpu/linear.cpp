// y = x W^T + b with packed weights: panels of 16 outputs, inside a panel the 16 weights of one input lie together.
//
// Each output accumulates over its inputs strictly in order in one fp32 FMA chain that starts at 0; bias and rounding come
// last. Tiling over rows, panels and threads only decides who computes an output, never how, so a row's result is the same bits
// alone, in any batch and on any number of threads. A panel is streamed from memory once per block of rows.
#include "api.h"
#include "simd.h"

#include <algorithm>
#include <vector>

namespace baton {
namespace {

constexpr int64_t kPanel = 16;     // outputs per panel: two vectors
constexpr int kTileRows = 6;       // 6 x 2 accumulators, 2 weight vectors, 1 input: 15 of 16 registers
constexpr int64_t kBlockBytes = 256 << 10;  // rows of x that share one pass over the weights stay in half the L2 cache

inline void load_weights(const float* p, F8& low, F8& high) { low = load8(p), high = load8(p + 8); }
inline void load_weights(const bf16* p, F8& low, F8& high) { load_pairs(p, low, high); }

template <typename T>
inline void finish(F8 low, F8 high, const T* bias, T* y, int64_t num_valid) {
  float lanes[kPanel];
  if (num_valid == kPanel) {
    if (bias) low = add8(low, load8(bias)), high = add8(high, load8(bias + 8));
    store8(y, low), store8(y + 8, high);
    return;
  }
  store8(lanes, low), store8(lanes + 8, high);
  for (int64_t n = 0; n < num_valid; ++n) y[n] = narrow<T>(bias ? lanes[n] + widen(bias[n]) : lanes[n]);
}

// R rows against P neighbouring panels. x holds the rows interleaved: x[k * R + r].
template <typename T, int R, int P>
void tile(const float* x, const T* weights, int64_t num_inputs, const T* bias, T* y, int64_t y_stride, int64_t num_valid) {
  F8 acc[R][P][2];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p][0] = acc[r][p][1] = zero8();
  for (int64_t k = 0; k < num_inputs; ++k) {
    for (int p = 0; p < P; ++p) {
      F8 low, high;
      load_weights(weights + (p * num_inputs + k) * kPanel, low, high);
      for (int r = 0; r < R; ++r) {
        F8 value = splat(x[k * R + r]);
        acc[r][p][0] = fma8(value, low, acc[r][p][0]);
        acc[r][p][1] = fma8(value, high, acc[r][p][1]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      finish(acc[r][p][0], acc[r][p][1], bias ? bias + p * kPanel : nullptr, y + r * y_stride + p * kPanel,
             std::min(kPanel, num_valid - p * kPanel));
}

template <typename T>
void tile_of(int rows, const float* x, const T* weights, int64_t num_inputs, const T* bias, T* y, int64_t stride, int64_t valid) {
  switch (rows) {
    case 1: return tile<T, 1, 1>(x, weights, num_inputs, bias, y, stride, valid);
    case 2: return tile<T, 2, 1>(x, weights, num_inputs, bias, y, stride, valid);
    case 3: return tile<T, 3, 1>(x, weights, num_inputs, bias, y, stride, valid);
    case 4: return tile<T, 4, 1>(x, weights, num_inputs, bias, y, stride, valid);
    case 5: return tile<T, 5, 1>(x, weights, num_inputs, bias, y, stride, valid);
    default: return tile<T, 6, 1>(x, weights, num_inputs, bias, y, stride, valid);
  }
}

// A few rows are bound by memory: several panels at once keep several streams and enough independent sums in flight.
template <typename T>
void few_rows(int rows, const float* x, const T* weights, int64_t num_inputs, const T* bias, T* y, int64_t stride, int64_t valid) {
  if (rows == 1) return tile<T, 1, 4>(x, weights, num_inputs, bias, y, stride, valid);
  if (rows == 2) return tile<T, 2, 2>(x, weights, num_inputs, bias, y, stride, valid);
  return tile<T, 3, 2>(x, weights, num_inputs, bias, y, stride, valid);
}

// Splits `count` rows into tiles of nearly equal height.
struct Tiling {
  int64_t count, num_tiles;
  explicit Tiling(int64_t rows) : count(rows), num_tiles((rows + kTileRows - 1) / kTileRows) {}
  int64_t start(int64_t i) const { return i * count / num_tiles; }
};

template <typename T>
void interleave(const T* x, int64_t rows, int64_t num_inputs, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < num_inputs; ++k) out[k * rows + r] = widen(x[r * num_inputs + k]);
}

template <typename T>
void linear(const T* x, const T* packed, const T* bias, T* y, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int threads) {
  if (num_rows == 0 || num_outputs == 0) return;
  const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
  const int64_t block_rows = std::max<int64_t>(4 * kTileRows, kBlockBytes / 4 / std::max<int64_t>(1, num_inputs) / kTileRows * kTileRows);
  const int num_threads = int(std::min<int64_t>(num_rows * num_outputs * num_inputs < (1 << 15) ? 1 : threads, num_panels));
  std::vector<float> interleaved(std::min(block_rows, num_rows) * num_inputs);
#pragma omp parallel num_threads(num_threads)
  for (int64_t first = 0; first < num_rows; first += block_rows) {
    const Tiling tiles(std::min(block_rows, num_rows - first));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles.num_tiles; ++i) {
      const int64_t row = tiles.start(i);
      interleave(x + (first + row) * num_inputs, tiles.start(i + 1) - row, num_inputs, interleaved.data() + row * num_inputs);
    }
    const int64_t group = tiles.count == 1 ? 4 : tiles.count <= 3 ? 2 : 1;  // panels computed together
#pragma omp for schedule(static)
    for (int part = 0; part < num_threads; ++part) {
      const int64_t end = num_panels * (part + 1) / num_threads;
      for (int64_t panel = num_panels * part / num_threads; panel < end;) {
        const bool is_group = group > 1 && panel + group <= end;
        const int64_t n = panel * kPanel;
        const T* weights = packed + n * num_inputs;
        const T* panel_bias = bias ? bias + n : nullptr;
        for (int64_t i = 0; i < tiles.num_tiles; ++i) {
          const int64_t row = tiles.start(i);
          const int rows = int(tiles.start(i + 1) - row);
          const float* rows_x = interleaved.data() + row * num_inputs;
          T* out = y + (first + row) * num_outputs + n;
          (is_group ? few_rows<T> : tile_of<T>)(rows, rows_x, weights, num_inputs, panel_bias, out, num_outputs, num_outputs - n);
        }
        panel += is_group ? group : 1;
      }
    }
  }
}

// Where output n of a panel lies: bf16 panels pair output i with i + 8 in one 32-bit word, so that shifts widen them.
inline int64_t place(int64_t n, const float*) { return n; }
inline int64_t place(int64_t n, const bf16*) { return n < 8 ? 2 * n : 2 * (n - 8) + 1; }

template <typename T>
void pack(const T* weight, T* packed, int64_t num_outputs, int64_t num_inputs, int threads) {
  const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    T* out = packed + panel * kPanel * num_inputs;
    for (int64_t n = 0; n < kPanel; ++n) {
      const bool is_real = panel * kPanel + n < num_outputs;
      const T* row = weight + (panel * kPanel + n) * num_inputs;
      for (int64_t k = 0; k < num_inputs; ++k) out[k * kPanel + place(n, packed)] = is_real ? row[k] : T(0);
    }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

void baton_pack_linear(int is_bf16, const void* weight, void* packed, int64_t n, int64_t k, int threads) {
  if (is_bf16)
    pack(static_cast<const bf16*>(weight), static_cast<bf16*>(packed), n, k, threads);
  else
    pack(static_cast<const float*>(weight), static_cast<float*>(packed), n, k, threads);
}

void baton_linear(int is_bf16, const void* x, const void* packed, const void* bias, void* y, int64_t t, int64_t n, int64_t k, int threads) {
  if (is_bf16)
    linear(static_cast<const bf16*>(x), static_cast<const bf16*>(packed), static_cast<const bf16*>(bias), static_cast<bf16*>(y), t, n, k, threads);
  else
    linear(static_cast<const float*>(x), static_cast<const float*>(packed), static_cast<const float*>(bias), static_cast<float*>(y), t, n, k, threads);
}
