// What the matrix products with and without AMX share: the weights, the storing of results, their constants.
#pragma once

#include "rows.h"
#include "simd.h"

#include <algorithm>

namespace baton {

constexpr int64_t kPanel = 16;              // outputs per panel
constexpr int64_t kBlockBytes = 256 << 10;  // rows of x that share one pass over the weights stay in half the L2 cache
constexpr int64_t kRunsPerThread = 4;       // units of work per thread: few, so that weights stream in long runs

template <typename T>
struct Linear {
  const T* weight;  // packed
  const T* bias;    // [num_outputs] or null
  int64_t num_outputs, num_inputs;
  int64_t num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
};

// Floats of working memory that a product of so many rows needs: its rows in another order, or padded to whole tiles.
inline int64_t linear_work(int64_t rows, int64_t num_inputs) { return (rows + 16) * (num_inputs + 32); }

// What results are rounded to before they are stored: the dtype of the weights, or nothing beyond fp32.
enum class Rounding { kDtype, kNone };

template <typename T, typename E>
void put_outputs(const float* sums, const T* bias, int64_t count, Rounding rounding, E* y) {
  int64_t n = 0;
  for (; n + 8 <= count; n += 8) {
    const F8 value = bias ? add8(load8(sums + n), load8(bias + n)) : load8(sums + n);
    if (rounding == Rounding::kDtype)
      put8<T>(y + n, value);
    else
      store8(y + n, value);
  }
  for (; n < count; ++n) {
    const float value = bias ? sums[n] + widen(bias[n]) : sums[n];
    if (rounding == Rounding::kDtype)
      put1<T>(y + n, value);
    else
      y[n] = narrow<E>(value);
  }
}

}  // namespace baton
