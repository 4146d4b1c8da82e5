// What this CPU can do at most, for a benchmark to compare with: bytes read per second and fused multiply-adds per second.
//
// Compiled for the machine it runs on (bench/engine_limits.py). Vectors are GCC's own, so one source serves every instruction set.
// The asm statements cost nothing and are what keeps the loops: without them a compiler sees that nobody uses the results.
#include <omp.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));
constexpr int kFloats = kBytes / sizeof(float);
// Twelve independent sums: at least latency times units, and few enough for 16 registers. They are variables and not an array, because
// an array whose address an asm statement could see stays in memory, and the loop would measure that.
#define EACH_SUM(DO) DO(s0) DO(s1) DO(s2) DO(s3) DO(s4) DO(s5) DO(s6) DO(s7) DO(s8) DO(s9) DO(s10) DO(s11)
constexpr int kChains = 12;

#if defined(__x86_64__)
#define KEEP(value) asm volatile("" : "+x"(value));
#else
#define KEEP(value) asm volatile("" : "+m"(value));
#endif

namespace {

inline Words load(const char* from) {
  Words words;
  std::memcpy(&words, from, kBytes);
  return words;
}

}  // namespace

// Seconds to read `bytes` bytes once; each thread reads a slice of its own.
extern "C" double limits_read_seconds(const char* data, int64_t bytes, int threads) {
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
    const int64_t lines = bytes / 256, index = omp_get_thread_num(), count = omp_get_num_threads();
    const char* from = data + lines * index / count * 256;
    const char* end = data + lines * (index + 1) / count * 256;
    Words a = {}, b = {}, c = {}, d = {};
    for (; from < end; from += 4 * kBytes) {
      a ^= load(from);
      b ^= load(from + kBytes);
      c ^= load(from + 2 * kBytes);
      d ^= load(from + 3 * kBytes);
    }
    KEEP(a) KEEP(b) KEEP(c) KEEP(d)
  }
  return omp_get_wtime() - start;
}

// Seconds for `rounds` rounds of multiply-adds on each thread; returns how many single-precision ones that were in `count`.
extern "C" double limits_fma_seconds(int64_t rounds, int threads, double* count) {
  int used = 1;
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    used = omp_get_num_threads();
    Floats factor, addend;
    for (int lane = 0; lane < kFloats; ++lane) factor[lane] = 0.999f, addend[lane] = 0.001f;
#define BEGIN(sum) Floats sum = addend;
#define ADD(sum) sum = sum * factor + addend;
    EACH_SUM(BEGIN)
    EACH_SUM(KEEP)  // equal sums would be computed once
    for (int64_t round = 0; round < rounds; ++round) {
      EACH_SUM(ADD)
    }
    EACH_SUM(KEEP)
  }
  const double seconds = omp_get_wtime() - start;
  *count = static_cast<double>(rounds) * kChains * kFloats * used;
  return seconds;
}
