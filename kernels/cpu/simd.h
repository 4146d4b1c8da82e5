// Eight fp32 lanes: AVX2 + FMA where the compiler was told to use them, plain arrays elsewhere. Only what the kernels need.
//
// Every kernel goes through these functions and never through operators on floats in its reductions, so that the same inputs
// take the same sequence of roundings in every template instance (the build also switches expression contraction off). That
// is what makes a row's result independent of the batch around it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define BATON_AVX512 1
#else
#define BATON_AVX512 0
#endif
#if defined(__AVX2__) && defined(__FMA__)
#define BATON_AVX2 1
#include <immintrin.h>
#else
#define BATON_AVX2 0
#endif

namespace baton {

using bf16 = uint16_t;  // the storage of a bfloat16; arithmetic is fp32

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

template <typename T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
// Round to nearest even; a NaN stays a NaN.
template <> inline bf16 narrow<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if BATON_AVX2

struct F8 {
  __m256 v;
};
inline F8 zero8() { return {_mm256_setzero_ps()}; }
inline F8 splat(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load8(const bf16* p) {
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline void store8(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline void store8(bf16* p, F8 a) {
  __m256i bits = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  __m256i words = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline F8 fma8(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 add8(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 sub8(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 mul8(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 div8(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 max8(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
// Two vectors out of eight 32-bit pairs of bf16: the low halves and the high halves.
inline void load_pairs(const bf16* p, F8& low, F8& high) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low.v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  high.v = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))));
}
inline float sum8(F8 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
// The sums of four vectors, in order.
inline void sum8x4(F8 a, F8 b, F8 c, F8 d, float* out) {
  __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float max_of8(F8 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline F8 round8(F8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for integral n in [-126, 127].
inline F8 pow2(F8 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
// a, but 0 where x < bound.
inline F8 zero_below(F8 x, F8 bound, F8 a) { return {_mm256_and_ps(_mm256_cmp_ps(x.v, bound.v, _CMP_NLT_UQ), a.v)}; }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }  // not into the first level

#else

struct F8 {
  float v[8];
};
#define BATON_LANES(expression)           \
  F8 out;                                 \
  for (int i = 0; i < 8; ++i) out.v[i] = (expression); \
  return out
inline F8 splat(float x) { BATON_LANES(x); }
inline F8 zero8() { return splat(0.0f); }
inline F8 load8(const float* p) { BATON_LANES(p[i]); }
inline F8 load8(const bf16* p) { BATON_LANES(widen(p[i])); }
inline void store8(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store8(bf16* p, F8 a) {
  for (int i = 0; i < 8; ++i) p[i] = narrow<bf16>(a.v[i]);
}
inline F8 fma8(F8 a, F8 b, F8 c) { BATON_LANES(a.v[i] * b.v[i] + c.v[i]); }
inline F8 add8(F8 a, F8 b) { BATON_LANES(a.v[i] + b.v[i]); }
inline F8 sub8(F8 a, F8 b) { BATON_LANES(a.v[i] - b.v[i]); }
inline F8 mul8(F8 a, F8 b) { BATON_LANES(a.v[i] * b.v[i]); }
inline F8 div8(F8 a, F8 b) { BATON_LANES(a.v[i] / b.v[i]); }
inline F8 max8(F8 a, F8 b) { BATON_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline void load_pairs(const bf16* p, F8& low, F8& high) {
  for (int i = 0; i < 8; ++i) low.v[i] = widen(p[2 * i]), high.v[i] = widen(p[2 * i + 1]);
}
inline float sum8(F8 a) {
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = a.v[i] + a.v[i + 4];
  return (x[0] + x[2]) + (x[1] + x[3]);
}
inline void sum8x4(F8 a, F8 b, F8 c, F8 d, float* out) { out[0] = sum8(a), out[1] = sum8(b), out[2] = sum8(c), out[3] = sum8(d); }
inline float max_of8(F8 a) {
  float x = a.v[0];
  for (int i = 1; i < 8; ++i) x = a.v[i] > x ? a.v[i] : x;
  return x;
}
inline F8 round8(F8 a) { BATON_LANES(std::nearbyint(a.v[i])); }
inline F8 pow2(F8 n) {
  F8 out;
  for (int i = 0; i < 8; ++i) {
    uint32_t bits = n.v[i] == n.v[i] ? uint32_t(int(n.v[i]) + 127) << 23 : 0;
    std::memcpy(&out.v[i], &bits, 4);
  }
  return out;
}
inline F8 zero_below(F8 x, F8 bound, F8 a) { BATON_LANES(x.v[i] < bound.v[i] ? 0.0f : a.v[i]); }
inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}
#undef BATON_LANES

#endif

// Sixteen fp32 lanes: one register where AVX-512 is there, two F8 elsewhere. The same operations on each lane, so the same bits.
#if BATON_AVX512
struct F16 {
  __m512 v;
};
inline F16 zero16() { return {_mm512_setzero_ps()}; }
inline F16 splat16(float x) { return {_mm512_set1_ps(x)}; }
inline F16 fma16(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Sixteen weights of a panel. A bf16 panel pairs output i with i + 8, so its lanes come as 0 8 1 9 ... and are sorted when stored.
inline F16 load_weights16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load_weights16(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void store_sums16(float* p, F16 a, const float*) { _mm512_storeu_ps(p, a.v); }
inline void store_sums16(float* p, F16 a, const bf16*) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  _mm512_storeu_ps(p, _mm512_permutexvar_ps(order, a.v));
}
#else
struct F16 {
  F8 low, high;
};
inline F16 zero16() { return {zero8(), zero8()}; }
inline F16 splat16(float x) { return {splat(x), splat(x)}; }
inline F16 fma16(F16 a, F16 b, F16 c) { return {fma8(a.low, b.low, c.low), fma8(a.high, b.high, c.high)}; }
inline F16 load_weights16(const float* p) { return {load8(p), load8(p + 8)}; }
inline F16 load_weights16(const bf16* p) {
  F16 out;
  load_pairs(p, out.low, out.high);
  return out;
}
template <typename T>
inline void store_sums16(float* p, F16 a, const T*) {
  store8(p, a.low), store8(p + 8, a.high);
}
#endif

// a rounded to what T can hold.
template <typename T> inline F8 rounded(F8 a);
template <> inline F8 rounded<float>(F8 a) { return a; }
#if BATON_AVX2
template <> inline F8 rounded<bf16>(F8 a) {
  __m256i bits = _mm256_castps_si256(a.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256 is_nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  __m256i words = _mm256_blendv_epi8(sum, quiet, _mm256_castps_si256(is_nan));
  return {_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u))))};
}
#else
template <> inline F8 rounded<bf16>(F8 a) {
  for (int i = 0; i < 8; ++i) a.v[i] = widen(narrow<bf16>(a.v[i]));
  return a;
}
#endif

// Stores values of dtype T either as T or, rounded to T, as fp32.
template <typename T, typename E>
inline void put8(E* p, F8 a) {
  if constexpr (sizeof(E) == sizeof(T)) store8(p, a);
  else store8(p, rounded<T>(a));
}
template <typename T, typename E>
inline void put1(E* p, float a) {
  *p = narrow<E>(widen(narrow<T>(a)));
}

// e^x for x <= 88, about 2 units in the last place; exactly 1 at 0, exactly 0 below -87 and at -inf; NaN stays NaN.
// Range reduction and polynomial as in Cephes' expf (S. Moshier, netlib.org/cephes).
inline F8 exp8(F8 x) {
  const F8 low = splat(-87.0f);
  F8 clamped = max8(low, x);
  F8 n = round8(mul8(clamped, splat(1.44269504088896341f)));
  F8 r = fma8(n, splat(-0.693359375f), clamped);
  r = fma8(n, splat(2.12194440e-4f), r);
  F8 y = splat(1.9875691500e-4f);
  y = fma8(y, r, splat(1.3981999507e-3f));
  y = fma8(y, r, splat(8.3334519073e-3f));
  y = fma8(y, r, splat(4.1665795894e-2f));
  y = fma8(y, r, splat(1.6666665459e-1f));
  y = fma8(y, r, splat(5.0000001201e-1f));
  y = add8(fma8(mul8(r, r), y, r), splat(1.0f));
  return zero_below(x, low, mul8(y, pow2(n)));
}
inline float exp1(float x) {
  float lanes[8];
  store8(lanes, exp8(splat(x)));
  return lanes[0];
}

}  // namespace baton
