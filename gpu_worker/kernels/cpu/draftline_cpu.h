// The plain C interface of the CPU kernels: what gpu_worker/kernels/native.py calls through ctypes.
//
// Every function that can fail returns 0 on success and a negative value otherwise; dl_last_error() then tells the
// calling thread why. Handles are not locked: one call at a time per team and per model.
#pragma once
#include <cstdint>

#define DL_API extern "C" __attribute__((visibility("default")))

// Raised with every change to a struct or signature below; the loader refuses a library with another number.
constexpr int32_t kDlAbiVersion = 8;

typedef struct DlTeam DlTeam;
typedef struct DlLinear DlLinear;
typedef struct DlModel DlModel;
typedef struct DlPool DlPool;

enum DlIsa : int32_t { DL_PORTABLE = 0, DL_AVX2 = 1, DL_AVX512_VNNI = 2, DL_AVX512_BF16 = 3 };

// How a linear's weights lie in memory (formats.hpp has the layouts).
enum DlFormat : int32_t { DL_W8 = 0, DL_Q4_0 = 1, DL_Q4_1 = 2, DL_Q8_0 = 3, DL_BF16 = 4 };

// What weights are packed from: float rows or the blocks of a GGUF.
enum DlSource : int32_t { DL_FROM_FLOAT32 = 0, DL_FROM_Q4_0 = 1, DL_FROM_Q4_1 = 2, DL_FROM_Q8_0 = 3 };

enum DlTable : int32_t { DL_TABLE_FLOAT32 = 0, DL_TABLE_BF16 = 1, DL_TABLE_FLOAT16 = 2, DL_TABLE_LINEAR = 3 };

typedef struct DlLayer {
  const DlLinear* qkv;      // columns: all query heads, all key heads, all value heads
  const DlLinear* o;
  const DlLinear* gate_up;  // blocks of 16 columns in turn: gate, up, gate, up, ...
  const DlLinear* down;
  const float* attn_norm;  // [hidden], or null: attention's input is not normed
  const float* mlp_norm;   // [hidden]
  const float* q_norm;     // [head_dim] or null
  const float* k_norm;     // [head_dim] or null
} DlLayer;

typedef struct DlModelDesc {
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;     // even, at most head_dim; halves are rotated against each other
  int64_t num_positions;  // rows of cos and sin
  int64_t vocab;          // rows of the embedding
  float eps;
  float attn_scale;
  int32_t activation_group;  // 32 or 64 inputs share one scale
  int32_t table;             // DlTable
  const void* embedding;     // [vocab, hidden] of the table's type, or a DlLinear
  const float* cos;          // [num_positions, rotary_dim / 2]
  const float* sin;
  const float* final_norm;   // [hidden], or null: none
  const DlLayer* layers;     // [num_layers]
} DlModelDesc;

// How a draft head makes its layers' input from a token's embedding e and a feature row f. With f' = fuse(f), or f
// where there is no fuse or f is recycled, and norms where they are given, x = [norm(e), norm(f')]. With `combine`,
// combine(x) enters the layers. Without, x is the input of layer 0's qkv, and the residual stream begins as f'.
typedef struct DlDraftInput {
  const DlLinear* fuse;         // from target features to hidden, or null
  const DlLinear* combine;      // from 2 hidden to hidden, or null
  const float* embedding_norm;  // [hidden] or null
  const float* feature_norm;    // [hidden] or null
  int32_t embedding_first;      // 0: x = [norm(f'), norm(e)]
  int32_t residual_is_normed;   // without combine: the residual stream begins as norm(f')
  int32_t recycles_normed;      // the next step of a chain takes the output after the final norm, else before
} DlDraftInput;

// One forward pass: T = qo_indptr[B] rows of B requests (terms of gpu_worker/forward_batch.py).
typedef struct DlBatch {
  int64_t num_requests;
  int64_t page_size;
  const int64_t* input_ids;     // [T]
  const int64_t* positions;     // [T]
  const int64_t* out_slots;     // [T]
  const int32_t* qo_indptr;     // [B + 1]
  const int32_t* kv_lens;       // [B]
  const int32_t* page_indptr;   // [B + 1]
  const int32_t* page_indices;  // [page_indptr[B]]
  const int32_t* tree_indptr;   // [T + 1] into tree_ancestors, or null: no trees. Equal bounds: a causal row.
  const int32_t* tree_ancestors;  // per row of a tree: rows of its request it sees, itself last, ascending
} DlBatch;

// What goes into a forward pass beside its batch, and what comes out.
typedef struct DlRows {
  const float* features;           // of a draft head: [T, inputs of fuse], or [T, hidden]; else null
  int32_t recycled;                // features [T, hidden] come from the head itself and pass by `fuse`
  int32_t num_captured;
  const int32_t* captured_layers;  // [num_captured]
  float* hidden_out;               // [T, hidden] after the final norm
  float* residual_out;             // [T, hidden] before it, or null
  float* captured_out;             // [T, num_captured * hidden]: the residual stream after each of these layers
} DlRows;

// Where D sequences stand before their dynamic trees grow. The rows of a tree take the KV slots lengths[d] and on, at
// most budgets[d] of them, and rotary positions by their depth.
typedef struct DlTree {
  int64_t num_sequences;
  int64_t max_nodes;            // the most of any budget
  int64_t page_size;
  const float* hidden;          // [D, hidden], recycled: a head's outputs at the last known token; null: a decoder
  const float* normed;          // [D, hidden], what the output head reads there
  const int32_t* lengths;       // [D] known tokens
  const int32_t* page_indptr;   // [D + 1]
  const int32_t* page_indices;  // [page_indptr[D]]
  const int32_t* budgets;       // [D] nodes behind the root, 0..max_nodes
  const float* temperatures;    // [D] above 0: nodes are ranked by log q + the target's own noise; null: all 0
  const int64_t* seeds;         // [D] of that noise
  int32_t max_depth;
  int32_t max_children;         // of one node, at most 64
  double least_value;           // nodes worth less are left out; at most 0
  const DlLinear* lm_head;
  const int64_t* target_ids;    // [columns of lm_head]: the ids that they stand for; null: their own numbers
} DlTree;

// [D, max_nodes] each: the nodes behind a root, parents first; parents index them, -1: the root. values: the sum of the
// draft's log-probabilities down to the node.
typedef struct DlTreeOut {
  int64_t* tokens;
  int32_t* parents;
  double* values;
  int32_t* counts;  // [D] nodes of each sequence
} DlTreeOut;

DL_API int32_t dl_abi_version();
DL_API const char* dl_last_error();
DL_API int32_t dl_best_isa();
DL_API int32_t dl_isa_supported(int32_t isa);

DL_API DlTeam* dl_team_create(int32_t num_threads);
DL_API void dl_team_destroy(DlTeam* team);

// A linear of n outputs and k inputs with all weights zero.
DL_API DlLinear* dl_linear_create(int32_t format, int64_t n, int64_t k);
DL_API void dl_linear_destroy(DlLinear* linear);
DL_API int64_t dl_linear_bytes(const DlLinear* linear);
// Puts `rows` source rows (row_bytes apart) into columns: row j goes to column0 + (j / 16) * 16 * stride + j % 16.
DL_API int32_t dl_linear_pack(DlLinear* linear, int32_t source, const void* data, int64_t rows, int64_t row_bytes,
                              int64_t column0, int64_t stride);
DL_API int32_t dl_linear_set_bias(DlLinear* linear, const float* bias);
// A new linear of the given columns (a reduced vocabulary).
DL_API DlLinear* dl_linear_select(const DlLinear* linear, const int64_t* columns, int64_t count);
// Weights of `count` columns as floats, [count, k].
DL_API int32_t dl_linear_dequantise(const DlLinear* linear, const int64_t* columns, int64_t count, float* out);
// out[rows, n] = x[rows, k] times the weights (plus bias). activation_group: 32 or 64 inputs share a scale.
DL_API int32_t dl_linear_run(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group,
                             const float* x, int64_t rows, float* out);
// The column of each row's largest output (ties: the lowest), without writing the outputs.
DL_API int32_t dl_linear_argmax(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group,
                                const float* x, int64_t rows, int64_t* columns);
// The count <= 64 largest outputs, descending, ties by lower column; lse is the log-sum-exp of all outputs.
DL_API int32_t dl_linear_topk(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group,
                              const float* x, int64_t rows, int32_t count, int64_t* columns, float* values, float* lse);
// out[rows, n / k, k] = x + silu(x times the weights, plus bias): residual blocks side by side, n a multiple of k.
DL_API int32_t dl_linear_residual_blocks(const DlLinear* linear, DlTeam* team, int32_t isa, int32_t activation_group,
                                         const float* x, int64_t rows, float* out);
// What Medusa drafts: the residual blocks of `blocks` over x[rows, k], then for the first `heads` of them the `count`
// <= 64 largest outputs of lm_head, descending, as ids (target_ids[column]; null: the column) and log-probabilities, each
// [rows, heads, count].
DL_API int32_t dl_medusa_candidates(const DlLinear* blocks, const DlLinear* lm_head, DlTeam* team, int32_t isa,
                                    int32_t activation_group, const float* x, int64_t rows, int32_t heads, int32_t count,
                                    const int64_t* target_ids, int64_t* ids, float* log_probabilities);

// The count <= 64 columns of each row with the largest weights[rows, n] + Gumbel noise of (keys[rows], id), descending,
// and those sums. ids[rows, n], or null: a column's number is its id. The noise is gpu_worker/sampling/random.py's.
DL_API int32_t dl_gumbel_topk(DlTeam* team, const float* weights, const int64_t* ids, const int64_t* keys, int64_t rows,
                              int64_t n, int32_t count, int64_t* columns, float* values);

DL_API DlPool* dl_pool_create(int64_t num_layers, int64_t num_slots, int64_t num_kv_heads, int64_t head_dim);
DL_API void dl_pool_destroy(DlPool* pool);
DL_API int32_t dl_pool_move(DlPool* pool, const int64_t* sources, const int64_t* targets, int64_t count);
DL_API int32_t dl_pool_write(DlPool* pool, int64_t layer, const int64_t* slots, int64_t count, const float* keys,
                             const float* values);
DL_API int32_t dl_pool_read(const DlPool* pool, int64_t layer, const int64_t* slots, int64_t count, float* keys,
                            float* values);

// draft_input null: a decoder whose residual stream begins with the embedding.
DL_API DlModel* dl_model_create(const DlModelDesc* desc, const DlDraftInput* draft_input, int32_t isa);
DL_API void dl_model_destroy(DlModel* model);
DL_API int32_t dl_model_forward(DlModel* model, DlTeam* team, DlPool* pool, const DlBatch* batch, const DlRows* rows);
DL_API int32_t dl_model_tree(DlModel* model, DlTeam* team, DlPool* pool, const DlTree* tree, const DlTreeOut* out);
