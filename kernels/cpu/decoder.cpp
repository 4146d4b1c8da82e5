// A whole step of a decoder (Llama family) as one parallel region: some ten short phases for each layer, no call in between.
//
// The phases are the operations of the other files in the same order with the same roundings, so the result has the same bits
// as those operations called one by one. Between the phases rows are fp32 holding values of the model's dtype: each value is
// rounded once, where the operation would have stored it, and never converted back and forth.
#include "api.h"
#include "attention.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

#include <map>

namespace baton {
namespace {

constexpr int64_t kRowsPerUnit = 2;

// The fp32 buffers of a step, cut from the caller's memory.
struct Work {
  float *residual, *hidden, *projected, *qkv, *attended, *gate_up, *activated, *product;

  static int64_t widest(const BatonDecoder& d) {
    return std::max(std::max(d.hidden_size, d.num_heads * d.head_dim), d.intermediate_size);
  }
  static int64_t floats_per_token(const BatonDecoder& d) {
    const int64_t qkv = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim;
    return 3 * d.hidden_size + qkv + d.num_heads * d.head_dim + 3 * d.intermediate_size;
  }
  static int64_t floats(const BatonDecoder& d, int64_t num_tokens) {
    return num_tokens * floats_per_token(d) + linear_work(num_tokens, widest(d));
  }
  Work(const BatonDecoder& d, float* memory, int64_t num_tokens) {
    const auto take = [&](int64_t width) {
      float* piece = memory;
      memory += num_tokens * width;
      return piece;
    };
    residual = take(d.hidden_size), hidden = take(d.hidden_size), projected = take(d.hidden_size);
    qkv = take((d.num_heads + 2 * d.num_kv_heads) * d.head_dim), attended = take(d.num_heads * d.head_dim);
    gate_up = take(2 * d.intermediate_size), activated = take(d.intermediate_size);
    product = memory;
  }
};

template <typename T>
class Step {
 public:
  Step(const BatonDecoder& decoder, const BatonCache& cache, const BatonStep& step, float* memory, float* logits, int threads)
      : d_(decoder), cache_(cache), step_(step), batch_(step.batch), num_tokens_(step.batch.num_tokens),
        work_(decoder, memory, step.batch.num_tokens), logits_(logits) {
    for (int64_t i = 0; i < d_.num_layers; ++i) {
      const int64_t window = d_.layers[i].window;
      if (plans_.find(window) == plans_.end()) plans_.emplace(window, attention(i).plan(threads));
      rows_max_ = std::max(rows_max_, plans_.at(window).rows_max);
    }
  }

  void run(Crew& crew) {
    Scratch<T> scratch(rows_max_, Attention<T, float>::padded_width(cache_));
    embed(crew);
    for (int64_t i = 0; i < d_.num_layers; ++i) {
      const BatonDecoderLayer& layer = d_.layers[i];
      const bool is_last = i == d_.num_layers - 1;
      norm(crew, num_tokens_, i ? work_.projected : nullptr, layer.input_norm);
      multiply(crew, work_.hidden, num_tokens_, layer.qkv, work_.qkv);
      place_keys(crew, layer, i);
      if (is_last && !step_.num_samples) return;  // a prompt chunk in the middle: all KV is written, nobody wants logits
      attention(i).run(crew, plans_.at(layer.window), scratch);
      if (is_last) keep_sampled_rows(crew);  // nothing after the last layer's KV depends on the other rows
      const int64_t rows = is_last ? step_.num_samples : num_tokens_;
      multiply(crew, work_.attended, rows, layer.output, work_.projected);
      norm(crew, rows, work_.projected, layer.post_attention_norm);
      multiply(crew, work_.hidden, rows, layer.gate_up, work_.gate_up);
      activate(crew, rows);
      multiply(crew, work_.activated, rows, layer.down, work_.projected);
    }
    norm(crew, step_.num_samples, work_.projected, d_.final_norm);
    linear(crew, work_.hidden, step_.num_samples, weights(d_.head), Rounding::kNone, logits_, work_.product);
  }

 private:
  static const T* at(const void* p) { return static_cast<const T*>(p); }
  static Linear<T> weights(const BatonLinear& w) { return {at(w.weight), at(w.bias), w.num_outputs, w.num_inputs}; }
  int64_t query_size() const { return d_.num_heads * d_.head_dim; }
  int64_t key_size() const { return d_.num_kv_heads * d_.head_dim; }
  int64_t qkv_size() const { return query_size() + 2 * key_size(); }

  Attention<T, float> attention(int64_t layer) const {
    BatonCache cache = cache_;
    cache.layer = layer;
    return Attention<T, float>(work_.qkv, qkv_size(), cache, batch_, d_.num_heads, d_.scale, d_.layers[layer].window, work_.attended);
  }

  template <typename F>
  void for_rows(Crew& crew, int64_t rows, F&& body) {
    crew.each((rows + kRowsPerUnit - 1) / kRowsPerUnit, [&](int64_t unit) {
      for (int64_t row = unit * kRowsPerUnit; row < std::min(rows, (unit + 1) * kRowsPerUnit); ++row) body(row);
    });
  }

  void embed(Crew& crew) {
    for_rows(crew, num_tokens_, [&](int64_t row) {
      convert_row(at(d_.embedding) + step_.token_ids[row] * d_.hidden_size, work_.residual + row * d_.hidden_size, d_.hidden_size);
    });
  }

  // hidden = norm(residual), after residual += addend if there is one.
  void norm(Crew& crew, int64_t rows, const float* addend, const void* weight) {
    const int64_t width = d_.hidden_size;
    for_rows(crew, rows, [&](int64_t row) {
      float *residual = work_.residual + row * width, *hidden = work_.hidden + row * width;
      if (addend)
        rms_norm_row<T>(addend + row * width, residual, at(weight), d_.eps, hidden, residual, width);
      else
        rms_norm_row<T, float>(residual, nullptr, at(weight), d_.eps, hidden, nullptr, width);
    });
  }

  void multiply(Crew& crew, const float* x, int64_t rows, const BatonLinear& w, float* y) {
    linear(crew, x, rows, weights(w), Rounding::kDtype, y, work_.product);
  }

  // Head norms and rotation of queries and keys in place; keys and values go to their slots in the cache.
  void place_keys(Crew& crew, const BatonDecoderLayer& layer, int64_t index) {
    const int64_t head_dim = d_.head_dim, plane = d_.num_kv_heads * cache_.block_size * head_dim;
    for_rows(crew, num_tokens_, [&](int64_t row) {
      float *q = work_.qkv + row * qkv_size(), *k = q + query_size(), *v = k + key_size();
      const auto norm_heads = [&](float* heads, int64_t count, const void* weight) {
        for (int64_t h = 0; h < count; ++h, heads += head_dim)
          rms_norm_row<T, float>(heads, nullptr, at(weight), d_.eps, heads, nullptr, head_dim);
      };
      if (layer.query_norm) norm_heads(q, d_.num_heads, layer.query_norm), norm_heads(k, d_.num_kv_heads, layer.key_norm);
      const float *cos = d_.cos + batch_.positions[row] * d_.half, *sin = d_.sin + batch_.positions[row] * d_.half;
      rotate_heads<T>(q, cos, sin, d_.num_heads, head_dim, d_.half);
      rotate_heads<T>(k, cos, sin, d_.num_kv_heads, head_dim, d_.half);
      const int64_t block = step_.slots[row] / cache_.block_size, offset = step_.slots[row] % cache_.block_size;
      T* page = static_cast<T*>(cache_.data) + (block * cache_.num_layers + index) * 2 * plane;
      for (int64_t h = 0; h < d_.num_kv_heads; ++h) {
        T* to = page + (h * cache_.block_size + offset) * head_dim;
        convert_row(k + h * head_dim, to, head_dim);
        convert_row(v + h * head_dim, to + plane, head_dim);
      }
    });
  }

  void activate(Crew& crew, int64_t rows) {
    const int64_t width = d_.intermediate_size;
    for_rows(crew, rows, [&](int64_t row) {
      const float* gate = work_.gate_up + row * 2 * width;
      silu_mul_row<T>(gate, gate + width, work_.activated + row * width, width);
    });
  }

  // Moves the rows to be sampled to the front; rows only move down, in order, so one thread does it in place.
  void keep_sampled_rows(Crew& crew) {
    crew.each(1, [&](int64_t) {
      for (int64_t i = 0; i < step_.num_samples; ++i) {
        const int64_t row = step_.sample_rows[i];
        std::copy_n(work_.attended + row * query_size(), query_size(), work_.attended + i * query_size());
        std::copy_n(work_.residual + row * d_.hidden_size, d_.hidden_size, work_.residual + i * d_.hidden_size);
      }
    });
  }

  const BatonDecoder& d_;
  const BatonCache cache_;
  const BatonStep& step_;
  const BatonBatch& batch_;
  const int64_t num_tokens_;
  const Work work_;
  float* const logits_;
  std::map<int64_t, AttentionPlan> plans_;  // by window
  int64_t rows_max_ = 0;
};

int64_t first_bad(const BatonDecoder& d, const BatonCache& cache, const BatonStep& step) {
  const BatonBatch& batch = step.batch;
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < batch.num_tokens; ++i)
    if (step.token_ids[i] < 0 || step.token_ids[i] >= d.vocab_size) return i * 4 + kBadToken;
  for (int64_t i = 0; i < batch.num_tokens; ++i)
    if (step.slots[i] < 0 || step.slots[i] >= num_slots) return i * 4 + kBadSlot;
  const int64_t sequence = first_bad_sequence(cache, batch);
  if (sequence >= 0) return sequence * 4 + kBadSequence;
  for (int64_t s = 0; s < batch.num_sequences; ++s)
    for (int64_t t = batch.query_starts[s]; t < batch.query_starts[s + 1]; ++t)
      if (batch.positions[t] >= d.num_positions) return s * 4 + kBadSequence;
  for (int64_t i = 0, previous = -1; i < step.num_samples; previous = step.sample_rows[i++])
    if (step.sample_rows[i] <= previous || step.sample_rows[i] >= batch.num_tokens) return i * 4 + kBadSampleRow;
  return -1;
}

template <typename T>
void run_step(const BatonDecoder& decoder, const BatonCache& cache, const BatonStep& step, float* work, float* logits, int threads) {
  Step<T> whole(decoder, cache, step, work, logits, threads);
  parallel(threads, [&](Crew& crew) { whole.run(crew); });
}

}  // namespace
}  // namespace baton

using namespace baton;

int64_t baton_decoder_work(const BatonDecoder* decoder, int64_t num_tokens) { return Work::floats(*decoder, num_tokens); }

int64_t baton_decoder_step(const BatonDecoder* decoder, const BatonCache* cache, const BatonStep* step, float* work, float* logits,
                           int threads) {
  const int64_t bad = first_bad(*decoder, *cache, *step);
  if (bad >= 0 || !step->batch.num_tokens) return bad;
  (decoder->is_bf16 ? run_step<bf16> : run_step<float>)(*decoder, *cache, *step, work, logits, threads);
  return -1;
}
