// The C interface of the CPU kernels: raw pointers and extents that the caller has checked (kernels/native.py does).
//
// `is_bf16` names the dtype of all non-index tensors: 0 = fp32, 1 = bf16. `threads` is the number of threads to use, at least 1.
// Functions that read indexes from memory check them before they touch anything and return -1 when all is well, else the
// position of the first bad index; nothing has been written then.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define BATON_API extern "C" __attribute__((visibility("default")))
#else
#define BATON_API extern "C"
#endif

// Extents of the cache [B, L, 2, Hkv, block_size, D] and the layer meant.
struct BatonCache {
  void* data;
  int64_t num_blocks, num_layers, num_kv_heads, block_size, head_dim, layer;
};

// A ragged batch, as AttentionMeta in kernels/ops.py.
struct BatonBatch {
  const int64_t* positions;      // [T]
  const int32_t* query_starts;   // [S + 1]
  const int32_t* context_lens;   // [S]
  const int32_t* block_tables;   // [S, blocks_max]
  int64_t num_tokens, num_sequences, blocks_max;
};

// One matrix with packed weights (baton_pack_linear); bias may be null.
struct BatonLinear {
  const void *weight, *bias;
  int64_t num_outputs, num_inputs;
};

// One layer of a decoder of the Llama family. The head norms may be null; window 0: none.
struct BatonDecoderLayer {
  const void* input_norm;
  BatonLinear qkv;
  const void *query_norm, *key_norm;
  BatonLinear output;
  const void* post_attention_norm;
  BatonLinear gate_up, down;
  int64_t window;
};

// A whole decoder. Its vectors are of the dtype that is_bf16 names; cos and sin are fp32 [num_positions, half].
struct BatonDecoder {
  int64_t is_bf16, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, half, num_positions;
  float eps, scale;
  const void* embedding;  // [vocab_size, hidden_size]
  const BatonDecoderLayer* layers;
  const void* final_norm;
  BatonLinear head;
  const float *cos, *sin;
};

// What one step computes: a batch, its tokens, where their KV goes and which rows' logits are wanted.
struct BatonStep {
  BatonBatch batch;
  const int64_t* token_ids;    // [T]
  const int64_t* slots;        // [T]
  const int64_t* sample_rows;  // [R], increasing
  int64_t num_samples;
};

// Which index baton_decoder_step found bad: the result is position * 4 + kind.
enum BatonBadIndex { kBadToken = 0, kBadSlot = 1, kBadSequence = 2, kBadSampleRow = 3 };

// To be called once, before anything else: 0, or 1 when the system does not let this process use the matrix unit.
BATON_API int baton_prepare();
// The name of the layout in which linear layers of a dtype are packed, and how many inputs a panel of 16 outputs has in it.
BATON_API const char* baton_layout(int is_bf16);
BATON_API int64_t baton_panel_inputs(int is_bf16, int64_t k);
BATON_API void baton_pack_linear(int is_bf16, const void* weight, void* packed, int64_t n, int64_t k, int threads);
BATON_API void baton_linear(int is_bf16, const void* x, const void* packed, const void* bias, void* y, int64_t t, int64_t n, int64_t k,
                            int threads);
BATON_API void baton_logits(int is_bf16, const void* x, const void* packed, const void* bias, float* y, int64_t t, int64_t n, int64_t k,
                            int threads);
BATON_API int64_t baton_embedding(int64_t row_bytes, const int64_t* ids, const void* table, void* out, int64_t t, int64_t v);
BATON_API void baton_rms_norm(int is_bf16, const void* x, const void* residual, const void* weight, float eps, void* out, void* total,
                              int64_t rows, int64_t width, int threads);
BATON_API void baton_rope(int is_bf16, void* q, void* k, const float* cos, const float* sin, int64_t t, int64_t q_heads, int64_t k_heads,
                          int64_t head_dim, int64_t half, int threads);
BATON_API void baton_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t t, int64_t width, int threads);
BATON_API int64_t baton_kv_write(int is_bf16, const void* k, const void* v, const BatonCache* cache, const int64_t* slots, int64_t t);
BATON_API int64_t baton_attention(int is_bf16, const void* q, const BatonCache* cache, const BatonBatch* batch, int64_t num_heads,
                                  float scale, int64_t window, void* out, int threads);
BATON_API void baton_gather(const void* cache, int64_t block_bytes, const int64_t* block_ids, int64_t count, void* out, uint64_t* lanes);
BATON_API void baton_scatter(const void* src, void* cache, int64_t block_bytes, const int64_t* block_ids, int64_t count, uint64_t* lanes);

// The forward pass of one step: writes the KV of all T tokens and the fp32 logits [R, vocab_size] of the sample rows. `work` holds
// baton_decoder_work(decoder, T) floats.
BATON_API int64_t baton_decoder_work(const BatonDecoder* decoder, int64_t num_tokens);
BATON_API int64_t baton_decoder_step(const BatonDecoder* decoder, const BatonCache* cache, const BatonStep* step, float* work, float* logits,
                                     int threads);

// How the token of one row is chosen, as Draw in kernels/ops.py.
struct BatonDraw {
  double temperature, top_p, min_p, noise;
  int64_t top_k;
};

// One token id for each row of logits [num_rows, vocab_size]; -1 for a row whose largest logit is not finite.
BATON_API void baton_sample(const float* logits, int64_t num_rows, int64_t vocab_size, const BatonDraw* draws, int64_t* token_ids,
                            int threads);
