// The C interface of the attention in attention.h.
#include "attention.h"

namespace baton {

int64_t first_bad_sequence(const BatonCache& cache, const BatonBatch& b) {
  if (b.query_starts[0] != 0 || b.query_starts[b.num_sequences] != b.num_tokens) return 0;
  for (int64_t s = 0; s < b.num_sequences; ++s) {
    if (b.query_starts[s + 1] < b.query_starts[s] || b.context_lens[s] < 0) return s;
    const int64_t num_blocks = (b.context_lens[s] + cache.block_size - 1) / cache.block_size;
    if (num_blocks > b.blocks_max) return s;
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int32_t block = b.block_tables[s * b.blocks_max + i];
      if (block < 0 || block >= cache.num_blocks) return s;
    }
    for (int64_t t = b.query_starts[s]; t < b.query_starts[s + 1]; ++t)
      if (b.positions[t] < 0 || b.positions[t] >= b.context_lens[s]) return s;
  }
  return -1;
}

namespace {

template <typename T>
void attention(const void* q, const BatonCache& cache, const BatonBatch& batch, int64_t num_heads, float scale, int64_t window, void* out,
               int threads) {
  const Attention<T, T> work(static_cast<const T*>(q), num_heads * cache.head_dim, cache, batch, num_heads, scale, window,
                             static_cast<T*>(out));
  AttentionPlan plan = work.plan(threads);
  parallel(plan.is_worth_threads ? threads : 1, [&](Crew& crew) {
    Scratch<T> scratch(plan.rows_max, work.width);
    work.run(crew, plan, scratch);
  });
}

}  // namespace
}  // namespace baton

int64_t baton_attention(int is_bf16, const void* q, const BatonCache* cache, const BatonBatch* batch, int64_t num_heads, float scale,
                        int64_t window, void* out, int threads) {
  const int64_t bad = baton::first_bad_sequence(*cache, *batch);
  if (bad >= 0) return bad;
  (is_bf16 ? baton::attention<baton::bf16> : baton::attention<float>)(q, *cache, *batch, num_heads, scale, window, out, threads);
  return -1;
}
