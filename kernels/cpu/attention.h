// Causal attention over the paged KV cache for ragged batches: prefill chunks, decode rows and mixtures alike.
//
// Online softmax (arXiv 1805.02867, as in FlashAttention) whose key order is fixed by absolute key index: tiles of 32 keys, 16
// tiles make a chunk, chunks are merged in order. Who computes a chunk (one thread in turn, or several threads with a merge
// afterwards) never changes how, so a row gets the same bits as part of a long prefill, as a decode step and with any neighbours.
// All query heads of one KV head are computed together: K and V of a tile are read (and widened) once for them.
#pragma once

#include "api.h"
#include "simd.h"
#include "team.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace baton {

constexpr int64_t kTileKeys = 32;
constexpr int64_t kChunkKeys = 512;
constexpr int64_t kItemRows = 48;  // rows (query, head) that share a pass over the keys: their state stays in L1/L2
constexpr int64_t kDirectRows = 6;  // up to so many rows bf16 is widened in registers, again for each group of 3
constexpr int64_t kSpreadFloatsMax = 4 << 20;  // 16 MiB of partial states
constexpr int64_t kParallelProducts = 1 << 17;  // less work than this is done before another thread has woken up
inline const float kMinusInf = -std::numeric_limits<float>::infinity();

// Running softmax of R rows: maximum, denominator, unnormalised output [R][width].
struct State {
  float *peak, *total, *out;
  static int64_t floats(int64_t rows, int64_t width) { return rows * (width + 2); }
  State(float* memory, int64_t rows) : peak(memory), total(memory + rows), out(memory + 2 * rows) {}
  State(float* peak, float* total, float* out) : peak(peak), total(total), out(out) {}
  State rows_from(int64_t row, int64_t width) const { return State{peak + row, total + row, out + row * width}; }
  void clear(int64_t rows, int64_t width) {
    std::fill(peak, peak + rows, kMinusInf);
    std::fill(total, total + rows, 0.0f);
    std::fill(out, out + rows * width, 0.0f);
  }
};

// One thread's working memory.
template <typename T>
struct Scratch {
  std::vector<float> queries, scores, keys, values, chunk, running;
  const T *key_rows[kTileKeys], *value_rows[kTileKeys];              // where the rows of the tile lie in the cache
  const T *next_key_rows[kTileKeys], *next_value_rows[kTileKeys];    // the same of the tile that comes next
  const float *wide_key_rows[kTileKeys], *wide_value_rows[kTileKeys];  // the same rows widened in `keys` and `values`
  Scratch(int64_t rows, int64_t width)
      : queries(rows * width), scores(rows * kTileKeys), keys(kTileKeys * width), values(kTileKeys * width),
        chunk(State::floats(rows, width)), running(State::floats(rows, width)) {
    for (int64_t j = 0; j < kTileKeys; ++j) wide_key_rows[j] = keys.data() + j * width, wide_value_rows[j] = values.data() + j * width;
  }
};

// Queries [first, last) of one sequence against KV heads [first_head, last_head). Rows are ordered by KV head, query, query head.
struct Item {
  int64_t sequence, first, last, first_head, last_head;
  int64_t num_chunks;
  int64_t partial;  // where its chunks' states begin among the partials (in floats), if they are computed apart
};

// The work of one batch, the same for every layer with the same window.
struct AttentionPlan {
  std::vector<Item> items;
  std::vector<std::pair<int64_t, int64_t>> chunks;  // (item, chunk), when chunks are computed apart
  std::vector<float> partials;                      // their states
  int64_t rows_max = 0;
  bool is_worth_threads = false;
};

// Attention over one layer. T: dtype of the cache; E: T, or float for queries and results that are values of T widened to fp32.
template <typename T, typename E>
struct Attention {
  const E* q;
  int64_t q_stride;  // from one row's queries to the next's
  const BatonCache cache;
  const BatonBatch& batch;
  int64_t num_heads, group, width;  // width: head_dim rounded up to whole vectors, padded with zeros
  float scale;
  int64_t window;  // 0: none
  E* out;          // rows of num_heads * head_dim

  Attention(const E* q, int64_t q_stride, const BatonCache& cache, const BatonBatch& batch, int64_t num_heads, float scale, int64_t window,
            E* out)
      : q(q), q_stride(q_stride), cache(cache), batch(batch), num_heads(num_heads), group(num_heads / cache.num_kv_heads),
        width(padded_width(cache)), scale(scale), window(window), out(out) {}

  static int64_t padded_width(const BatonCache& cache) { return (cache.head_dim + 7) / 8 * 8; }

  int64_t rows_per_head(const Item& item) const { return (item.last - item.first) * group; }
  int64_t rows_of(const Item& item) const { return rows_per_head(item) * (item.last_head - item.first_head); }
  int64_t key_end(int64_t query) const { return batch.positions[query] + 1; }
  int64_t key_begin(int64_t query) const { return window ? std::max<int64_t>(0, key_end(query) - window) : 0; }

  int64_t first_key(const Item& item) const {
    int64_t key = key_begin(item.first);
    for (int64_t i = item.first; i < item.last; ++i) key = std::min(key, key_begin(i));
    return key;
  }
  int64_t last_key(const Item& item) const {
    int64_t key = 0;
    for (int64_t i = item.first; i < item.last; ++i) key = std::max(key, key_end(i));
    return key;
  }

  // (Extents are copied to locals in the inner loops: vector stores may alias anything, members would be read again.)
  template <typename V>
  void load_row(const V* from, float* to) const {
    const int64_t head_dim = cache.head_dim;
    int64_t d = 0;
    for (; d + 8 <= head_dim; d += 8) store8(to + d, load8(from + d));
    for (; d < width; ++d) to[d] = d < head_dim ? widen(from[d]) : 0.0f;
  }

  // Calls body(row, query, head) for each row of the item, in order.
  template <typename F>
  void for_rows(const Item& item, F&& body) const {
    int64_t row = 0;
    for (int64_t kv_head = item.first_head; kv_head < item.last_head; ++kv_head)
      for (int64_t query = item.first; query < item.last; ++query)
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) body(row++, query, head);
  }

  void load_queries(const Item& item, float* to) const {
    for_rows(item, [&](int64_t row, int64_t query, int64_t head) { load_row(q + query * q_stride + head * cache.head_dim, to + row * width); });
  }

  // Rows of whole vectors are used where they lie; bf16 rows that many queries share are widened once for all of them.
  bool uses_rows_in_place(int64_t rows) const {
    return width == cache.head_dim && (sizeof(T) == sizeof(float) || rows <= kDirectRows);
  }

  const T* row_at(const Item& item, int64_t kv_head, int64_t key) const {
    const int64_t plane = cache.num_kv_heads * cache.block_size * cache.head_dim;
    const int64_t block = batch.block_tables[item.sequence * batch.blocks_max + key / cache.block_size];
    return static_cast<const T*>(cache.data) + (block * cache.num_layers + cache.layer) * 2 * plane +
           (kv_head * cache.block_size + key % cache.block_size) * cache.head_dim;
  }

  void find_rows(const Item& item, int64_t kv_head, int64_t begin, int64_t end, const T** keys, const T** values) const {
    const int64_t head_dim = cache.head_dim, plane = cache.num_kv_heads * cache.block_size * head_dim;
    for (int64_t key = begin; key < end;) {
      const T* k = row_at(item, kv_head, key);
      const int64_t stop = std::min(end, (key / cache.block_size + 1) * cache.block_size);
      for (; key < stop; ++key, k += head_dim) keys[key - begin] = k, values[key - begin] = k + plane;
    }
    for (int64_t j = end - begin; j % 4; ++j) keys[j] = keys[end - begin - 1];  // whole groups; masked later
  }

  void widen_rows(int64_t num_keys, Scratch<T>& s) const {
    const int64_t padded = (num_keys + 3) / 4 * 4;
    for (int64_t j = 0; j < padded; ++j) load_row(s.key_rows[j], s.keys.data() + j * width);
    for (int64_t j = 0; j < num_keys; ++j) load_row(s.value_rows[j], s.values.data() + j * width);
  }

  // Blocks lie anywhere, so the hardware cannot guess the next ones. While rows are used, `ahead` (or null) names those of the next
  // tile to ask for: one for each, spread over the work, because only so many requests can be on their way at a time.
  static void prefetch_row(const T* row, int64_t num_bytes) {
    for (int64_t offset = 0; offset < num_bytes; offset += 64) prefetch_far(reinterpret_cast<const char*>(row) + offset);
  }

  template <int R, typename K>
  static void score_rows(const float* queries, const K* const* keys, int64_t num_keys, float* scores, const int64_t width,
                         const T* const* ahead) {
    for (int64_t j = 0; j < num_keys; j += 4) {
      if (ahead)
        for (int64_t i = j; i < j + 4; ++i) prefetch_row(ahead[i], width * int64_t(sizeof(T)));
      F8 acc[R][4];  // 12 sums, 3 queries and a key: 16 registers
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < 4; ++i) acc[r][i] = zero8();
      const K *k0 = keys[j], *k1 = keys[j + 1], *k2 = keys[j + 2], *k3 = keys[j + 3];
      for (int64_t d = 0; d < width; d += 8) {
        F8 query[R];
        for (int r = 0; r < R; ++r) query[r] = load8(queries + r * width + d);
        F8 key = load8(k0 + d);
        for (int r = 0; r < R; ++r) acc[r][0] = fma8(query[r], key, acc[r][0]);
        key = load8(k1 + d);
        for (int r = 0; r < R; ++r) acc[r][1] = fma8(query[r], key, acc[r][1]);
        key = load8(k2 + d);
        for (int r = 0; r < R; ++r) acc[r][2] = fma8(query[r], key, acc[r][2]);
        key = load8(k3 + d);
        for (int r = 0; r < R; ++r) acc[r][3] = fma8(query[r], key, acc[r][3]);
      }
      for (int r = 0; r < R; ++r) sum8x4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], scores + r * kTileKeys + j);
    }
  }

  template <int R, int V, typename K>
  static void add_values(const float* weights, const K* const* values, int64_t num_keys, float* to, int64_t d, const int64_t width,
                         const T* const* ahead) {
    F8 acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = load8(to + r * width + d + 8 * v);
    for (int64_t j = 0; j < num_keys; ++j) {
      if (ahead) prefetch_row(ahead[j] + d, 8 * V * int64_t(sizeof(T)));
      F8 weight[R];
      for (int r = 0; r < R; ++r) weight[r] = splat(weights[r * kTileKeys + j]);
      const K* row = values[j] + d;
      for (int v = 0; v < V; ++v) {
        const F8 value = load8(row + 8 * v);
        for (int r = 0; r < R; ++r) acc[r][v] = fma8(weight[r], value, acc[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store8(to + r * width + d + 8 * v, acc[r][v]);
  }

  template <int R, typename K>
  static void add_rows(const float* weights, const K* const* values, int64_t num_keys, float* to, const int64_t width,
                       const T* const* ahead) {
    int64_t d = 0;
    for (; d + 32 <= width; d += 32) add_values<R, 4, K>(weights, values, num_keys, to, d, width, ahead);
    for (; d < width; d += 8) add_values<R, 1, K>(weights, values, num_keys, to, d, width, ahead);
  }

  // Scores of one row become weights; the row's state is rescaled to the new maximum. `low`, `high`: its visible keys here.
  void soften(float* scores, int64_t low, int64_t high, float& peak, float& total, float* row_out) const {
    if (low >= high) {  // nothing visible in this tile
      std::fill(scores, scores + kTileKeys, 0.0f);
      return;
    }
    std::fill(scores, scores + low, kMinusInf);
    std::fill(scores + high, scores + kTileKeys, kMinusInf);
    F8 lanes[kTileKeys / 8], most = splat(kMinusInf);
    for (int64_t i = 0; i < kTileKeys / 8; ++i) {
      lanes[i] = mul8(load8(scores + 8 * i), splat(scale));
      most = max8(lanes[i], most);
    }
    const float new_peak = std::max(peak, max_of8(most));
    F8 sum = zero8();
    for (int64_t i = 0; i < kTileKeys / 8; ++i) {
      F8 weight = exp8(sub8(lanes[i], splat(new_peak)));
      sum = add8(sum, weight);
      store8(scores + 8 * i, weight);
    }
    if (new_peak != peak) {
      const F8 shrink = exp8(splat(peak - new_peak));
      for (int64_t d = 0; d < width; d += 8) store8(row_out + d, mul8(load8(row_out + d), shrink));
      float factor[8];
      store8(factor, shrink);
      total *= factor[0];
      peak = new_peak;
    }
    total += sum8(sum);
  }

  // All visible keys of one chunk into `state`, which starts empty.
  void run_chunk(const Item& item, int64_t chunk, const float* queries, Scratch<T>& s, State state) const {
    const int64_t rows = rows_per_head(item);
    state.clear(rows_of(item), width);
    const int64_t end = std::min(last_key(item), (chunk + 1) * kChunkKeys);
    const bool in_place = uses_rows_in_place(rows);
    int64_t tile = std::max(first_key(item) / kTileKeys * kTileKeys, chunk * kChunkKeys);
    for (; tile < end; tile += kTileKeys) {
      const int64_t num_keys = std::min(kTileKeys, end - tile);
      for (int64_t kv_head = item.first_head; kv_head < item.last_head; ++kv_head) {
        const int64_t row = (kv_head - item.first_head) * rows;
        const State part = state.rows_from(row, width);
        find_rows(item, kv_head, tile, tile + num_keys, s.key_rows, s.value_rows);
        if (!in_place) {
          widen_rows(num_keys, s);
          run_tile(item, tile, num_keys, s.wide_key_rows, s.wide_value_rows, queries + row * width, s.scores.data(), part, nullptr, nullptr);
          continue;
        }
        const int64_t next = tile + kTileKeys, next_end = std::min(next + kTileKeys, end);
        const bool asks_ahead = rows <= kDirectRows && next_end - next == kTileKeys;  // (many rows: the tile is used long enough)
        if (asks_ahead) find_rows(item, kv_head, next, next_end, s.next_key_rows, s.next_value_rows);
        run_tile(item, tile, num_keys, s.key_rows, s.value_rows, queries + row * width, s.scores.data(), part,
                 asks_ahead ? s.next_key_rows : nullptr, asks_ahead ? s.next_value_rows : nullptr);
      }
    }
  }

  template <typename K>
  void run_tile(const Item& item, int64_t tile, int64_t num_keys, const K* const* keys, const K* const* values, const float* queries,
                float* scores, State state, const T* const* next_keys, const T* const* next_values) const {
    const int64_t rows = rows_per_head(item);
    by_rows(rows, [&](auto count, int64_t r) {
      score_rows<decltype(count)::value>(queries + r * width, keys, num_keys, scores + r * kTileKeys, width, r ? nullptr : next_keys);
    });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = item.first + r / group;
      const int64_t low = std::max<int64_t>(0, key_begin(query) - tile), high = std::min(num_keys, key_end(query) - tile);
      soften(scores + r * kTileKeys, low, high, state.peak[r], state.total[r], state.out + r * width);
    }
    by_rows(rows, [&](auto count, int64_t r) {
      add_rows<decltype(count)::value>(scores + r * kTileKeys, values, num_keys, state.out + r * width, width, r ? nullptr : next_values);
    });
  }

  template <int R>
  struct Count {
    static constexpr int value = R;
  };
  template <typename F>
  static void by_rows(int64_t rows, F&& body) {
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) body(Count<3>{}, r);
    if (rows - r == 2) body(Count<2>{}, r);
    if (rows - r == 1) body(Count<1>{}, r);
  }

  // Adds a chunk's state to the running one. Chunks in which a row saw nothing leave that row as it was.
  void merge(int64_t rows, State into, State chunk) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (chunk.peak[r] == kMinusInf && chunk.total[r] == 0.0f) continue;
      const float peak = std::max(into.peak[r], chunk.peak[r]);
      const float a = exp1(into.peak[r] - peak), b = exp1(chunk.peak[r] - peak);
      into.total[r] = into.total[r] * a + chunk.total[r] * b;
      float *to = into.out + r * width, *from = chunk.out + r * width;
      for (int64_t d = 0; d < width; d += 8)
        store8(to + d, fma8(load8(from + d), splat(b), mul8(load8(to + d), splat(a))));
      into.peak[r] = peak;
    }
  }

  void finish(const Item& item, State state) const {
    for_rows(item, [&](int64_t row, int64_t query, int64_t head) {
      E* to = out + (query * num_heads + head) * cache.head_dim;
      const F8 total = splat(state.total[row]);
      int64_t d = 0;
      for (; d + 8 <= cache.head_dim; d += 8) put8<T>(to + d, div8(load8(state.out + row * width + d), total));
      if (d == cache.head_dim) return;
      float tail[8];
      store8(tail, div8(load8(state.out + row * width + d), total));
      for (int64_t i = d; i < cache.head_dim; ++i) put1<T>(to + i, tail[i - d]);
    });
  }

  // Prompts are cut into pieces of queries against one KV head. The few queries of a decode step take all KV heads together: the
  // keys and values of a block then lie behind each other, and are read in one sweep.
  std::vector<Item> items() const {
    std::vector<Item> list;
    const int64_t queries_per_item = std::max<int64_t>(1, kItemRows / group);
    for (int64_t s = 0; s < batch.num_sequences; ++s)
      for (int64_t first = batch.query_starts[s], last; first < batch.query_starts[s + 1]; first = last) {
        last = std::min<int64_t>(first + queries_per_item, batch.query_starts[s + 1]);
        const bool is_few = (last - first) * group <= kDirectRows;
        const int64_t heads = is_few ? std::clamp<int64_t>(kItemRows / ((last - first) * group), 1, cache.num_kv_heads) : 1;
        for (int64_t head = 0; head < cache.num_kv_heads; head += heads) {
          Item item{s, first, last, head, std::min(head + heads, cache.num_kv_heads), 0, 0};
          item.num_chunks = (last_key(item) + kChunkKeys - 1) / kChunkKeys;
          list.push_back(item);
        }
      }
    return list;
  }

  AttentionPlan plan(int threads) const {
    AttentionPlan plan;
    plan.items = items();
    int64_t num_chunks = 0, num_floats = 0, num_keys = 0;
    for (Item& item : plan.items) {
      item.partial = num_floats;
      num_floats += item.num_chunks * State::floats(rows_of(item), width);
      num_chunks += item.num_chunks;
      plan.rows_max = std::max(plan.rows_max, rows_of(item));
      num_keys += item.num_chunks * rows_of(item) * kChunkKeys;
    }
    plan.is_worth_threads = threads > 1 && num_keys * width >= kParallelProducts;
    // Few items over many keys (a decode step of few sequences) would leave threads idle: their chunks are spread instead.
    const int64_t num_items = int64_t(plan.items.size());
    if (threads > 1 && num_items < 4 * threads && num_chunks > num_items && num_floats <= kSpreadFloatsMax) {
      plan.partials.resize(num_floats);
      for (int64_t i = 0; i < num_items; ++i)
        for (int64_t c = 0; c < plan.items[i].num_chunks; ++c) plan.chunks.emplace_back(i, c);
    }
    return plan;
  }

  State partial(AttentionPlan& plan, const Item& item, int64_t chunk) const {
    return State(plan.partials.data() + item.partial + chunk * State::floats(rows_of(item), width), rows_of(item));
  }

  // `s` has room for plan.rows_max rows and belongs to this thread.
  void run(Crew& crew, AttentionPlan& plan, Scratch<T>& s) const {
    const bool is_spread = !plan.chunks.empty();
    if (is_spread) {
      crew.each(int64_t(plan.chunks.size()), [&](int64_t unit) {
        const auto [i, chunk] = plan.chunks[unit];
        load_queries(plan.items[i], s.queries.data());
        run_chunk(plan.items[i], chunk, s.queries.data(), s, partial(plan, plan.items[i], chunk));
      });
    }
    const int64_t num_items = int64_t(plan.items.size());
    crew.each(num_items, [&](int64_t unit) {
      const Item& item = plan.items[num_items - 1 - unit];  // late queries see the most keys: longest first
      const int64_t rows = rows_of(item);
      State running(s.running.data(), rows);
      running.clear(rows, width);
      if (!is_spread) load_queries(item, s.queries.data());
      for (int64_t c = first_key(item) / kChunkKeys; c < item.num_chunks; ++c) {
        const State chunk = is_spread ? partial(plan, item, c) : State(s.chunk.data(), rows);
        if (!is_spread) run_chunk(item, c, s.queries.data(), s, chunk);
        merge(rows, running, chunk);
      }
      finish(item, running);
    });
  }
};

// The position of the first sequence that would read outside a tensor, or -1.
int64_t first_bad_sequence(const BatonCache& cache, const BatonBatch& batch);

}  // namespace baton
