// Runs the items of an attention plan for one layer.
#pragma once
#include "attention_plan.hpp"

namespace dl {

// Scratch of one thread.
class AttentionScratch {
 public:
  void reserve(const Kernels& kernels, const DlPool& pool);

 private:
  friend class LayerAttention;
  Memory memory_;
  float *scores_, *maximum_, *total_, *output_, *block_maximum_, *block_total_, *block_output_;
  uint8_t *weights_, *tiles_;
};

// Per (pair, block) results of tiles whose blocks are shared out among threads.
struct PartialResults {
  float* output;  // [count, padded]
  float* maximum;
  float* total;
};

class LayerAttention {
 public:
  // Whether the outputs of one KV head's query heads can be quantised on their own; else rows are quantised whole.
  static bool aligned(int64_t num_heads, const DlPool& pool) {
    return num_heads / pool.num_kv_heads * pool.head_dim % kSlab == 0;
  }

  LayerAttention(const AttentionPlan& plan, const Kernels& kernels, const DlPool& pool, int64_t layer,
                 int64_t num_heads, const uint8_t* queries, const PartialResults& partials, float* out);

  // Quantises the rows and heads of item `index` of the plan into `to`, or keeps its partial results. `likely_next` is
  // the index of an item that this thread may well do next, whose keys are fetched meanwhile.
  void run(int64_t index, int64_t likely_next, AttentionScratch& scratch, const Activations& to) const;
  // The heads of one KV head, for a row whose tile's blocks were shared out.
  void merge(int64_t row, int64_t kv_head, AttentionScratch& scratch, const Activations& to) const;

 private:
  void run_block(const AttentionItem& item, const RowTile& tile, int64_t block, int64_t row, int64_t rows,
                 AttentionBlock& call, AttentionScratch& scratch) const;
  void place_groups(const RowTile& tile, int64_t kv_head, int64_t block, int64_t row, int64_t keys,
                    AttentionBlock& call, AttentionScratch& scratch) const;
  void announce(const RowTile& tile, int64_t kv_head, int64_t block, AttentionBlock& call) const;
  // Keys from the first on whose groups are tiles of the pool for this row.
  int64_t keys_in_place(int64_t request, int64_t row) const;
  void finish(int64_t row, int64_t head, float total, const float* output) const;
  // Quantises the heads of a KV head, once their outputs are there.
  void quantise(int64_t row, int64_t kv_head, const Activations& to) const;
  int64_t partial_index(const RowTile& tile, int64_t row, int64_t head, int64_t block) const {
    return tile.partial + ((row - tile.row0) * num_heads_ + head) * tile.blocks + block;
  }

  const AttentionPlan& plan_;
  const Kernels& kernels_;
  const DlPool& pool_;
  const int64_t layer_, num_heads_, repeats_, padded_;
  const uint8_t* queries_;  // [rows, num_heads, head_dim / 2] pairs
  const PartialResults partials_;
  float* out_;  // [rows, num_heads * head_dim]
  const bool aligned_;  // a KV head's outputs are whole slabs of the next linear's inputs
};

}  // namespace dl
