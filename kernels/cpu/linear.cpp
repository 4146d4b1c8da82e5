// Packing of weights and the C interface of the matrix products in linear.h.
#include "linear.h"

#include "api.h"

#include <vector>

namespace baton {
namespace {

constexpr int64_t kParallelProducts = 1 << 15;  // less work than this is done before another thread has woken up

// The packed form of a dtype: its name, how many inputs a panel has in it, and where a weight lies in its panel.
template <typename T>
struct Layout {
  static constexpr const char* name = "panels16";
  static int64_t inputs(int64_t num_inputs) { return num_inputs; }
  static int64_t place(int64_t n, int64_t k) { return k * kPanel + n; }
};
#if BATON_AMX
template <>
struct Layout<bf16> {
  static constexpr const char* name = "tiles16x32";
  static int64_t inputs(int64_t num_inputs) { return amx_inputs(num_inputs); }
  static int64_t place(int64_t n, int64_t k) { return amx_place(n, k); }
};
#else
template <>
struct Layout<bf16> {
  static constexpr const char* name = "panels16";
  static int64_t inputs(int64_t num_inputs) { return num_inputs; }
  // Output i is paired with i + 8 in one 32-bit word, so that shifts widen them.
  static int64_t place(int64_t n, int64_t k) { return k * kPanel + (n < 8 ? 2 * n : 2 * (n - 8) + 1); }
};
#endif

template <typename T>
void pack(const void* weight, void* packed, int64_t num_outputs, int64_t num_inputs, int threads) {
  const int64_t inputs = Layout<T>::inputs(num_inputs);
  parallel(threads, [&](Crew& crew) {
    crew.each((num_outputs + kPanel - 1) / kPanel, [&](int64_t panel) {
      T* out = static_cast<T*>(packed) + panel * kPanel * inputs;
      for (int64_t n = 0; n < kPanel; ++n) {
        const bool is_real = panel * kPanel + n < num_outputs;
        const T* row = static_cast<const T*>(weight) + (panel * kPanel + n) * num_inputs;
        for (int64_t k = 0; k < inputs; ++k) out[Layout<T>::place(n, k)] = is_real && k < num_inputs ? row[k] : T(0);
      }
    });
  });
}

template <typename T, typename Y>
void run_linear(const void* x, const void* packed, const void* bias, Y* y, Rounding rounding, int64_t rows, int64_t n, int64_t k, int threads) {
  const Linear<T> weights{static_cast<const T*>(packed), static_cast<const T*>(bias), n, k};
  std::vector<float> work(linear_work(rows, k));
  parallel(rows * n * k < kParallelProducts ? 1 : threads,
           [&](Crew& crew) { linear(crew, static_cast<const T*>(x), rows, weights, rounding, y, work.data()); });
}

}  // namespace
}  // namespace baton

using namespace baton;

int baton_prepare() {
#if BATON_AMX
  return amx_allowed() ? 0 : 1;
#else
  return 0;
#endif
}

const char* baton_layout(int is_bf16) { return is_bf16 ? Layout<bf16>::name : Layout<float>::name; }

int64_t baton_panel_inputs(int is_bf16, int64_t k) { return is_bf16 ? Layout<bf16>::inputs(k) : Layout<float>::inputs(k); }

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
