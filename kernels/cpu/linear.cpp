// Packing of weights and the C interface of the matrix products in linear.h.
#include "linear.h"

#include "api.h"

#include <vector>

namespace baton {
namespace {

constexpr int64_t kParallelProducts = 1 << 15;  // less work than this is done before another thread has woken up

// Where output n of a panel lies: bf16 panels pair output i with i + 8 in one 32-bit word, so that shifts widen them.
inline int64_t place(int64_t n, const float*) { return n; }
inline int64_t place(int64_t n, const bf16*) { return n < 8 ? 2 * n : 2 * (n - 8) + 1; }

template <typename T>
void pack(const void* weight, void* packed, int64_t num_outputs, int64_t num_inputs, int threads) {
  parallel(threads, [&](Crew& crew) {
    crew.each((num_outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
      T* out = static_cast<T*>(packed) + panel * kPanel * num_inputs;
      for (int64_t n = 0; n < kPanel; ++n) {
        const bool is_real = panel * kPanel + n < num_outputs;
        const T* row = static_cast<const T*>(weight) + (panel * kPanel + n) * num_inputs;
        for (int64_t k = 0; k < num_inputs; ++k) out[k * kPanel + place(n, out)] = is_real ? row[k] : T(0);
      }
    });
  });
}

template <typename T, typename Y>
void run_linear(const void* x, const void* packed, const void* bias, Y* y, Rounding rounding, int64_t rows, int64_t n, int64_t k, int threads) {
  const Linear<T> weights{static_cast<const T*>(packed), static_cast<const T*>(bias), n, k};
  std::vector<float> work(rows * k);
  parallel(rows * n * k < kParallelProducts ? 1 : threads,
           [&](Crew& crew) { linear(crew, static_cast<const T*>(x), rows, weights, rounding, y, work.data()); });
}

}  // namespace
}  // namespace baton

using namespace baton;

void baton_pack_linear(int is_bf16, const void* weight, void* packed, int64_t n, int64_t k, int threads) {
  (is_bf16 ? pack<bf16> : pack<float>)(weight, packed, n, k, threads);
}

void baton_linear(int is_bf16, const void* x, const void* packed, const void* bias, void* y, int64_t t, int64_t n, int64_t k, int threads) {
  if (is_bf16)
    run_linear<bf16>(x, packed, bias, static_cast<bf16*>(y), Rounding::kDtype, t, n, k, threads);
  else
    run_linear<float>(x, packed, bias, static_cast<float*>(y), Rounding::kDtype, t, n, k, threads);
}

void baton_logits(int is_bf16, const void* x, const void* packed, const void* bias, float* y, int64_t t, int64_t n, int64_t k, int threads) {
  if (is_bf16)
    run_linear<bf16>(x, packed, bias, y, Rounding::kNone, t, n, k, threads);
  else
    run_linear<float>(x, packed, bias, y, Rounding::kNone, t, n, k, threads);
}
