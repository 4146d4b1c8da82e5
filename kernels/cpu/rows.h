// Row-wise operations between the matrix products: norms, rotary embedding, gated activation.
//
// T is the dtype of the model. Rows are stored as T, or (E = float) as values of T widened to fp32: the arithmetic is the same.
// A row is computed by one thread in one fixed order, so neighbours and threads change nothing.
#pragma once

#include "simd.h"

#include <cmath>

namespace baton {

// out = x / sqrt(mean(x^2) + eps) * weight. With `residual`, x + residual is normalised and stored in `total` (may be `residual`).
template <typename T, typename E>
void rms_norm_row(const E* x, const E* residual, const T* weight, float eps, E* out, E* total, int64_t width) {
  if (residual) {
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) put8<T>(total + i, add8(load8(x + i), load8(residual + i)));
    for (; i < width; ++i) put1<T>(total + i, widen(x[i]) + widen(residual[i]));
    x = total;
  }
  F8 squares = zero8();
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    F8 value = load8(x + i);
    squares = fma8(value, value, squares);
  }
  float square = sum8(squares);
  for (; i < width; ++i) square += widen(x[i]) * widen(x[i]);
  const float factor = 1.0f / std::sqrt(square / float(width) + eps);
  const F8 factors = splat(factor);
  for (i = 0; i + 8 <= width; i += 8) put8<T>(out + i, mul8(mul8(load8(x + i), factors), load8(weight + i)));
  for (; i < width; ++i) put1<T>(out + i, widen(x[i]) * factor * widen(weight[i]));
}

// Half rotation of the first 2 * half dims of each head, in place.
template <typename T, typename E>
void rotate_heads(E* first, const float* c, const float* s, int64_t heads, int64_t head_dim, int64_t half) {
  for (int64_t h = 0; h < heads; ++h, first += head_dim) {
    E* second = first + half;
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
      F8 a = load8(first + i), b = load8(second + i), ci = load8(c + i), si = load8(s + i);
      put8<T>(first + i, sub8(mul8(a, ci), mul8(b, si)));
      put8<T>(second + i, add8(mul8(b, ci), mul8(a, si)));
    }
    for (; i < half; ++i) {
      const float a = widen(first[i]), b = widen(second[i]);
      put1<T>(first + i, a * c[i] - b * s[i]);
      put1<T>(second + i, b * c[i] + a * s[i]);
    }
  }
}

inline F8 silu_times(F8 gate, F8 up) {
  // exp8 is valid up to 88: a gate below -88 yields about gate * 1e-38 instead of an even smaller number.
  const F8 exponent = sub8(zero8(), max8(gate, splat(-88.0f)));
  return mul8(div8(gate, add8(splat(1.0f), exp8(exponent))), up);
}

// out[i] = silu(gate[i]) * up[i]
template <typename T, typename E>
void silu_mul_row(const E* gate, const E* up, E* out, int64_t width) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) put8<T>(out + i, silu_times(load8(gate + i), load8(up + i)));
  if (i == width) return;
  float a[8] = {}, b[8] = {};  // the tail goes through the same code, padded
  for (int64_t j = i; j < width; ++j) a[j - i] = widen(gate[j]), b[j - i] = widen(up[j]);
  store8(a, silu_times(load8(a), load8(b)));
  for (int64_t j = i; j < width; ++j) put1<T>(out + j, a[j - i]);
}

// Copies values of E to T, exactly where they are values of T.
template <typename T, typename E>
void convert_row(const E* from, T* to, int64_t width) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) store8(to + i, load8(from + i));
  for (; i < width; ++i) to[i] = narrow<T>(widen(from[i]));
}

}  // namespace baton
