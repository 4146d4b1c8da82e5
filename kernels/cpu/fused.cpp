// Row-wise operations between the matrix products: embedding, norms, rotary embedding, gated activation.
//
// A row is computed by one thread in one fixed order, so neighbours and threads change nothing.
#include "api.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace baton {
namespace {

// Rows are cheap: below this many values one thread is faster than waking the others.
constexpr int64_t kParallelValues = 1 << 14;
inline int threads_for(int64_t values, int threads) { return values < kParallelValues ? 1 : threads; }

template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, float eps, T* out, T* total, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * width;
    if (residual) {
      T* sum = total + r * width;
      int64_t i = 0;
      for (; i + 8 <= width; i += 8) store8(sum + i, add8(load8(row + i), load8(residual + r * width + i)));
      for (; i < width; ++i) sum[i] = narrow<T>(widen(row[i]) + widen(residual[r * width + i]));
      row = sum;
    }
    F8 squares = zero8();
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      F8 value = load8(row + i);
      squares = fma8(value, value, squares);
    }
    float square = sum8(squares);
    for (; i < width; ++i) square += widen(row[i]) * widen(row[i]);
    const float factor = 1.0f / std::sqrt(square / float(width) + eps);
    const F8 factors = splat(factor);
    T* to = out + r * width;
    for (i = 0; i + 8 <= width; i += 8) store8(to + i, mul8(mul8(load8(row + i), factors), load8(weight + i)));
    for (; i < width; ++i) to[i] = narrow<T>(widen(row[i]) * factor * widen(weight[i]));
  }
}

template <typename T>
void rotate_heads(T* first, const float* c, const float* s, int64_t heads, int64_t head_dim, int64_t half) {
  for (int64_t h = 0; h < heads; ++h, first += head_dim) {
    T* second = first + half;
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
      F8 a = load8(first + i), b = load8(second + i), ci = load8(c + i), si = load8(s + i);
      store8(first + i, sub8(mul8(a, ci), mul8(b, si)));
      store8(second + i, add8(mul8(b, ci), mul8(a, si)));
    }
    for (; i < half; ++i) {
      const float a = widen(first[i]), b = widen(second[i]);
      first[i] = narrow<T>(a * c[i] - b * s[i]);
      second[i] = narrow<T>(b * c[i] + a * s[i]);
    }
  }
}

template <typename T>
void rope(T* q, T* k, const float* cos, const float* sin, int64_t t, int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t half,
          int threads) {
#pragma omp parallel for num_threads(threads_for(t * (q_heads + k_heads) * half, threads)) schedule(static)
  for (int64_t row = 0; row < t; ++row) {
    rotate_heads(q + row * q_heads * head_dim, cos + row * half, sin + row * half, q_heads, head_dim, half);
    rotate_heads(k + row * k_heads * head_dim, cos + row * half, sin + row * half, k_heads, head_dim, half);
  }
}

inline F8 silu_times(F8 gate, F8 up) {
  // exp8 is valid up to 88: a gate below -88 yields about gate * 1e-38 instead of an even smaller number.
  const F8 exponent = sub8(zero8(), max8(gate, splat(-88.0f)));
  return mul8(div8(gate, add8(splat(1.0f), exp8(exponent))), up);
}

template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t t, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads_for(t * width * 4, threads)) schedule(static)
  for (int64_t row = 0; row < t; ++row) {
    const T *gate = gate_up + row * 2 * width, *up = gate + width;
    T* to = out + row * width;
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) store8(to + i, silu_times(load8(gate + i), load8(up + i)));
    if (i < width) {  // the tail goes through the same code, padded
      float a[8] = {}, b[8] = {};
      for (int64_t j = i; j < width; ++j) a[j - i] = widen(gate[j]), b[j - i] = widen(up[j]);
      store8(a, silu_times(load8(a), load8(b)));
      for (int64_t j = i; j < width; ++j) to[j] = narrow<T>(a[j - i]);
    }
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_embedding(int64_t row_bytes, const int64_t* ids, const void* table, void* out, int64_t t, int64_t v) {
  for (int64_t i = 0; i < t; ++i)
    if (ids[i] < 0 || ids[i] >= v) return i;
  for (int64_t i = 0; i < t; ++i)
    std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(table) + ids[i] * row_bytes, row_bytes);
  return -1;
}

void baton_rms_norm(int is_bf16, const void* x, const void* residual, const void* weight, float eps, void* out, void* total, int64_t rows,
                    int64_t width, int threads) {
  if (is_bf16)
    rms_norm(static_cast<const bf16*>(x), static_cast<const bf16*>(residual), static_cast<const bf16*>(weight), eps,
             static_cast<bf16*>(out), static_cast<bf16*>(total), rows, width, threads);
  else
    rms_norm(static_cast<const float*>(x), static_cast<const float*>(residual), static_cast<const float*>(weight), eps,
             static_cast<float*>(out), static_cast<float*>(total), rows, width, threads);
}

void baton_rope(int is_bf16, void* q, void* k, const float* cos, const float* sin, int64_t t, int64_t q_heads, int64_t k_heads,
                int64_t head_dim, int64_t half, int threads) {
  if (is_bf16)
    rope(static_cast<bf16*>(q), static_cast<bf16*>(k), cos, sin, t, q_heads, k_heads, head_dim, half, threads);
  else
    rope(static_cast<float*>(q), static_cast<float*>(k), cos, sin, t, q_heads, k_heads, head_dim, half, threads);
}

void baton_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t t, int64_t width, int threads) {
  if (is_bf16)
    silu_mul(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), t, width, threads);
  else
    silu_mul(static_cast<const float*>(gate_up), static_cast<float*>(out), t, width, threads);
}
