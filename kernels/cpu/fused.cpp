// The C interface of the row-wise operations in rows.h, and the embedding lookup.
#include "api.h"
#include "rows.h"
#include "team.h"

#include <cstring>

namespace baton {
namespace {

// Rows are cheap: below this many values one thread is faster than waking the others.
constexpr int64_t kParallelValues = 1 << 14;
constexpr int64_t kRowsPerUnit = 4;

template <typename F>
void for_rows(int64_t rows, int64_t values_per_row, int threads, F&& body) {
  parallel(rows * values_per_row < kParallelValues ? 1 : threads, [&](Crew& crew) {
    crew.each((rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit) {
      for (int64_t row = unit * kRowsPerUnit; row < rows && row < (unit + 1) * kRowsPerUnit; ++row) body(row);
    });
  });
}

template <typename T>
void rms_norm(const void* x, const void* residual, const void* weight, float eps, void* out, void* total, int64_t rows, int64_t width,
              int threads) {
  const auto at = [&](const void* p, int64_t row) { return p ? static_cast<const T*>(p) + row * width : nullptr; };
  for_rows(rows, width, threads, [&](int64_t row) {
    rms_norm_row<T>(at(x, row), at(residual, row), static_cast<const T*>(weight), eps, const_cast<T*>(at(out, row)),
                    const_cast<T*>(at(total, row)), width);
  });
}

template <typename T>
void rope(void* q, void* k, const float* cos, const float* sin, int64_t t, int64_t q_heads, int64_t k_heads, int64_t head_dim, int64_t half,
          int threads) {
  for_rows(t, (q_heads + k_heads) * half, threads, [&](int64_t row) {
    rotate_heads<T>(static_cast<T*>(q) + row * q_heads * head_dim, cos + row * half, sin + row * half, q_heads, head_dim, half);
    rotate_heads<T>(static_cast<T*>(k) + row * k_heads * head_dim, cos + row * half, sin + row * half, k_heads, head_dim, half);
  });
}

template <typename T>
void silu_mul(const void* gate_up, void* out, int64_t t, int64_t width, int threads) {
  for_rows(t, 4 * width, threads, [&](int64_t row) {
    const T* gate = static_cast<const T*>(gate_up) + row * 2 * width;
    silu_mul_row<T>(gate, gate + width, static_cast<T*>(out) + row * width, width);
  });
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
  (is_bf16 ? rms_norm<bf16> : rms_norm<float>)(x, residual, weight, eps, out, total, rows, width, threads);
}

void baton_rope(int is_bf16, void* q, void* k, const float* cos, const float* sin, int64_t t, int64_t q_heads, int64_t k_heads,
                int64_t head_dim, int64_t half, int threads) {
  (is_bf16 ? rope<bf16> : rope<float>)(q, k, cos, sin, t, q_heads, k_heads, head_dim, half, threads);
}

void baton_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t t, int64_t width, int threads) {
  (is_bf16 ? silu_mul<bf16> : silu_mul<float>)(gate_up, out, t, width, threads);
}
