// Whole-block copies between the cache and a contiguous slab, with the payload digest computed on the words in flight.
//
// One thread and one pass: what is stored is what was summed. Digest definition: kernels/digest.py. The sums cost nothing beside the
// bytes: four vector additions for each row of 64. A gather stores to the slab through the cache, where the reader finds it soon after;
// a scatter stores past the cache, because a handed-over sequence is larger than it and the lines need not be read before they are
// overwritten (measured from a slab that is in the cache: 18 GB/s instead of 11 on one core).
#include "api.h"
#include "simd.h"

#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kRow = 64;
constexpr int64_t kAhead = 512;             // bytes that a streaming copy prefetches ahead of itself
constexpr int64_t kStreamBytes = 64 << 10;  // smaller blocks may well be read again while they are in the cache
typedef uint64_t Words __attribute__((vector_size(32)));

struct Lanes {
  Words a0{}, a1{}, b0{}, b1{};
  // Copies one row of 64 bytes and adds it.
  inline void copy_row(char* to, const char* from) {
    Words w0, w1;
    std::memcpy(&w0, from, 32), std::memcpy(&w1, from + 32, 32);
    std::memcpy(to, &w0, 32), std::memcpy(to + 32, &w1, 32);
    a0 += w0, a1 += w1;
    b0 += a0, b1 += a1;
  }
  // The same past the cache; `to` is aligned to a row.
  inline void stream_row(char* to, const char* from) {
#if defined(__AVX2__)
    _mm_prefetch(from + kAhead, _MM_HINT_T0);
    Words w0, w1;
    std::memcpy(&w0, from, 32), std::memcpy(&w1, from + 32, 32);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(w0));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), reinterpret_cast<__m256i>(w1));
    a0 += w0, a1 += w1;
    b0 += a0, b1 += a1;
#else
    copy_row(to, from);
#endif
  }
  void store(uint64_t* lanes) const {
    std::memcpy(lanes, &a0, 32), std::memcpy(lanes + 4, &a1, 32);
    std::memcpy(lanes + 8, &b0, 32), std::memcpy(lanes + 12, &b1, 32);
  }
};

inline char* at(const void* base, int64_t offset) { return static_cast<char*>(const_cast<void*>(base)) + offset; }

// Blocks whose size is no multiple of a row: rows straddle blocks, so bytes are collected into rows first.
void copy_odd(const void* slab, const void* cache, int64_t block_bytes, const int64_t* ids, int64_t count, bool to_slab, Lanes& lanes) {
  char row[kRow], sink[kRow];
  int64_t filled = 0;
  for (int64_t i = 0; i < count; ++i) {
    char *piece = at(slab, i * block_bytes), *block = at(cache, ids[i] * block_bytes);
    const char* from = to_slab ? block : piece;
    char* to = to_slab ? piece : block;
    for (int64_t done = 0; done < block_bytes;) {
      const int64_t part = kRow - filled < block_bytes - done ? kRow - filled : block_bytes - done;
      std::memcpy(row + filled, from + done, part);
      std::memcpy(to + done, row + filled, part);
      filled += part, done += part;
      if (filled == kRow) lanes.copy_row(sink, row), filled = 0;
    }
  }
  if (filled) {
    std::memset(row + filled, 0, kRow - filled);
    lanes.copy_row(sink, row);
  }
}

void copy(const void* slab, const void* cache, int64_t block_bytes, const int64_t* ids, int64_t count, bool to_slab, uint64_t* out) {
  Lanes lanes;
  if (block_bytes % kRow) {
    copy_odd(slab, cache, block_bytes, ids, count, to_slab, lanes);
  } else {
    const bool streams = !to_slab && block_bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(cache) % kRow == 0;
    for (int64_t i = 0; i < count; ++i) {
      char *piece = at(slab, i * block_bytes), *block = at(cache, ids[i] * block_bytes);
      const char* from = to_slab ? block : piece;
      char* to = to_slab ? piece : block;
      if (streams)
        for (int64_t offset = 0; offset < block_bytes; offset += kRow) lanes.stream_row(to + offset, from + offset);
      else
        for (int64_t offset = 0; offset < block_bytes; offset += kRow) lanes.copy_row(to + offset, from + offset);
    }
#if defined(__SSE2__)
    if (streams) _mm_sfence();  // the stores are seen by every thread that is told of them
#endif
  }
  lanes.store(out);
}

template <typename T>
void kv_write(const T* k, const T* v, const BatonCache& cache, const int64_t* slots, int64_t t) {
  const int64_t plane = cache.num_kv_heads * cache.block_size * cache.head_dim;
  const size_t row_bytes = cache.head_dim * sizeof(T);
  for (int64_t i = 0; i < t; ++i) {
    const int64_t block = slots[i] / cache.block_size, offset = slots[i] % cache.block_size;
    T* page = static_cast<T*>(cache.data) + (block * cache.num_layers + cache.layer) * 2 * plane;
    for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
      T* to = page + (h * cache.block_size + offset) * cache.head_dim;
      const int64_t from = (i * cache.num_kv_heads + h) * cache.head_dim;
      std::memcpy(to, k + from, row_bytes);
      std::memcpy(to + plane, v + from, row_bytes);
    }
  }
}

}  // namespace

void baton_gather(const void* cache, int64_t block_bytes, const int64_t* block_ids, int64_t count, void* out, uint64_t* lanes) {
  copy(out, cache, block_bytes, block_ids, count, true, lanes);
}

void baton_scatter(const void* src, void* cache, int64_t block_bytes, const int64_t* block_ids, int64_t count, uint64_t* lanes) {
  copy(src, cache, block_bytes, block_ids, count, false, lanes);
}

int64_t baton_kv_write(int is_bf16, const void* k, const void* v, const BatonCache* cache, const int64_t* slots, int64_t t) {
  const int64_t num_slots = cache->num_blocks * cache->block_size;
  for (int64_t i = 0; i < t; ++i)
    if (slots[i] < 0 || slots[i] >= num_slots) return i;
  if (is_bf16)
    kv_write(static_cast<const baton::bf16*>(k), static_cast<const baton::bf16*>(v), *cache, slots, t);
  else
    kv_write(static_cast<const float*>(k), static_cast<const float*>(v), *cache, slots, t);
  return -1;
}
