// Blocks on the wire in half the bytes: quantise while gathering, dequantise while scattering, digest of the bytes that travel.
//
// The format is defined in kernels/wire.py, whose torch implementation computes the same bits. One thread; a group (the slots of one
// head of K or V in one layer) is a few KiB, so its second look and its digest read the first-level cache.
#include "api.h"

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t kRow = 64;
constexpr float kTiny = 1e-30f;       // a group below it is all zeros: its reciprocal would overflow
constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
typedef uint64_t Words __attribute__((vector_size(32)));

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct Bf16 {
  typedef uint16_t Stored;
  static inline float load(uint16_t v) { return float_of(uint32_t(v) << 16); }
  static inline uint16_t store(float x) {
    const uint32_t u = bits_of(x);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  static inline uint32_t magnitude(uint16_t v) { return uint32_t(v & 0x7fff) << 16; }
};

struct Fp32 {
  typedef float Stored;
  static inline float load(float v) { return v; }
  static inline float store(float x) { return x; }
  static inline uint32_t magnitude(float v) { return bits_of(v) & 0x7fffffff; }
};

struct Int8 {
  static constexpr float kMax = 127.f;
  static inline uint8_t encode(float y) { return uint8_t(bits_of(y + kRound)); }
  static inline float decode(uint8_t v) { return float(int8_t(v)); }
};

// e4m3 without infinities (OCP 8-bit floating point, "E4M3"): bias 7, largest 448, subnormals in steps of 2^-9.
struct Fp8 {
  static constexpr float kMax = 448.f;
  // Both candidates are computed and one is masked in, on integers, so that the compiler makes vectors of it.
  static inline uint8_t encode(float y) {
    const uint32_t u = bits_of(y), magnitude = u & 0x7fffffff, limit = 0x43e00000;  // 448
    const uint32_t m = magnitude < limit ? magnitude : limit;
    const uint32_t normal = ((m + 0x7ffff + ((m >> 20) & 1)) >> 20) - (120u << 3);
    const uint32_t small = bits_of(float_of(m) * 512.f + kRound);
    const uint32_t is_small = 0u - uint32_t(m < 0x3c800000u);  // 2^-6, the smallest normal
    return uint8_t((u >> 24 & 0x80) | (small & is_small & 0x7f) | (normal & ~is_small));
  }
  static inline float decode(uint8_t v) { return kValues.of[v]; }
  struct Values {
    float of[256];
    Values() {
      for (uint32_t v = 0; v < 256; ++v) {
        const uint32_t code = v & 0x7f;
        const float a = code < 8 ? float(code) * 0.001953125f : float_of((code + (120u << 3)) << 20);
        of[v] = v & 0x80 ? -a : a;
      }
    }
  };
  static const Values kValues;
};
const Fp8::Values Fp8::kValues;

// The digest of kernels/digest.py, fed with bytes as they become final.
struct Digest {
  Words a0{}, a1{}, b0{}, b1{};
  inline void rows(const char*& at, const char* end) {
    for (; at + kRow <= end; at += kRow) {
      Words w0, w1;
      std::memcpy(&w0, at, 32), std::memcpy(&w1, at + 32, 32);
      a0 += w0, a1 += w1;
      b0 += a0, b1 += a1;
    }
  }
  void store(uint64_t* lanes) const {
    std::memcpy(lanes, &a0, 32), std::memcpy(lanes + 4, &a1, 32);
    std::memcpy(lanes + 8, &b0, 32), std::memcpy(lanes + 12, &b1, 32);
  }
};

template <typename T, typename F>
float quantise(const typename T::Stored* from, uint8_t* to, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t m = T::magnitude(from[i]);
    largest = m > largest ? m : largest;
  }
  const float amax = float_of(largest);
  if (largest >= 0x7f800000u || amax < kTiny) {
    std::memset(to, 0, n);
    return largest >= 0x7f800000u ? float_of(0x7fc00000u) : 0.f;
  }
  const float inverse = F::kMax / amax;
  for (int64_t i = 0; i < n; ++i) to[i] = F::encode(T::load(from[i]) * inverse);
  return amax / F::kMax;
}

template <typename T, typename F>
void gather(const void* cache, int64_t groups, int64_t n, int64_t wire_bytes, const int64_t* ids, int64_t count, char* out, Digest& digest) {
  for (int64_t i = 0; i < count; ++i, out += wire_bytes) {
    const auto* block = static_cast<const typename T::Stored*>(cache) + ids[i] * groups * n;
    const char* summed = out;
    char* scales = out + groups * n;
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = quantise<T, F>(block + g * n, reinterpret_cast<uint8_t*>(out + g * n), n);
      std::memcpy(scales + 4 * g, &scale, 4);
      digest.rows(summed, out + (g + 1) * n);
    }
    std::memset(scales + 4 * groups, 0, wire_bytes - groups * (n + 4));
    digest.rows(summed, out + wire_bytes);
  }
}

template <typename T, typename F>
void scatter(const char* in, void* cache, int64_t groups, int64_t n, int64_t wire_bytes, const int64_t* ids, int64_t count, Digest& digest) {
  for (int64_t i = 0; i < count; ++i, in += wire_bytes) {
    auto* block = static_cast<typename T::Stored*>(cache) + ids[i] * groups * n;
    const char* summed = in;
    for (int64_t g = 0; g < groups; ++g) {
      float scale;
      std::memcpy(&scale, in + groups * n + 4 * g, 4);
      digest.rows(summed, in + (g + 1) * n);
      const uint8_t* from = reinterpret_cast<const uint8_t*>(in + g * n);
      for (int64_t k = 0; k < n; ++k) block[g * n + k] = T::store(F::decode(from[k]) * scale);
    }
    digest.rows(summed, in + wire_bytes);
  }
}

}  // namespace

// `group` values in each of `groups` groups of a block; `wire_bytes` is a multiple of 64 and holds groups * (group + 4) bytes.
BATON_API void baton_wire_gather(int is_bf16, int is_fp8, const void* cache, int64_t groups, int64_t group, int64_t wire_bytes,
                                 const int64_t* ids, int64_t count, void* out, uint64_t* lanes) {
  Digest digest;
  char* to = static_cast<char*>(out);
  const auto run = is_bf16 ? (is_fp8 ? gather<Bf16, Fp8> : gather<Bf16, Int8>) : (is_fp8 ? gather<Fp32, Fp8> : gather<Fp32, Int8>);
  run(cache, groups, group, wire_bytes, ids, count, to, digest);
  digest.store(lanes);
}

BATON_API void baton_wire_scatter(int is_bf16, int is_fp8, const void* src, void* cache, int64_t groups, int64_t group, int64_t wire_bytes,
                                  const int64_t* ids, int64_t count, uint64_t* lanes) {
  Digest digest;
  const char* from = static_cast<const char*>(src);
  const auto run = is_bf16 ? (is_fp8 ? scatter<Bf16, Fp8> : scatter<Bf16, Int8>) : (is_fp8 ? scatter<Fp32, Fp8> : scatter<Fp32, Int8>);
  run(from, cache, groups, group, wire_bytes, ids, count, digest);
  digest.store(lanes);
}
