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
  Memory memory;
  float* maximum;
  float* total;
  float* output;
  void reserve(int64_t count, int64_t padded);
};

class LayerAttention {
 public:
  LayerAttention(const AttentionPlan& plan, const Kernels& kernels, const DlPool& pool, int64_t layer,
                 int64_t num_heads, const uint8_t* queries, PartialResults& partials, float* out);

  // Writes out[row, head] of the item's rows, or its partial results.
  void run(const AttentionItem& item, AttentionScratch& scratch) const;
  // out[row] of a row whose tile's blocks were shared out; nothing for others.
  void merge(int64_t row, AttentionScratch& scratch) const;

 private:
  void run_block(const AttentionItem& item, const RowTile& tile, int64_t block, int64_t row, int64_t rows,
                 AttentionBlock& call, AttentionScratch& scratch) const;
  void place_groups(const RowTile& tile, int64_t kv_head, int64_t block, int64_t row, int64_t keys,
                    AttentionBlock& call, AttentionScratch& scratch) const;
  int64_t partial_index(const RowTile& tile, int64_t row, int64_t head, int64_t block) const {
    return tile.partial + ((row - tile.row0) * num_heads_ + head) * tile.blocks + block;
  }

  const AttentionPlan& plan_;
  const Kernels& kernels_;
  const DlPool& pool_;
  const int64_t layer_, num_heads_, repeats_, padded_;
  const uint8_t* queries_;  // [rows, num_heads, head_dim / 2] pairs
  PartialResults& partials_;
  float* out_;  // [rows, num_heads * head_dim]
};

}  // namespace dl
