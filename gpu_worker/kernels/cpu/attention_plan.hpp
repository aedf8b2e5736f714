// How the attention of a forward pass is cut into work items; made once, used by every layer.
#pragma once
#include <cstdint>
#include <vector>

#include "draftline_cpu.h"
#include "isa.hpp"
#include "kv_pool.hpp"

namespace dl {

// Consecutive rows of one request that share the reading of its keys.
struct RowTile {
  int64_t request;
  int64_t row0, rows;   // in the batch
  int64_t blocks;       // of the row that sees the most keys
  int64_t partial = -1;  // index of its first (block, pair) result where its blocks are shared out, else -1
  bool alone = false;    // no other item reads what its rows write: keys and values can be made where they are used
};

// One KV head of a tile, from block `begin` to block `end` - 1.
struct AttentionItem {
  int64_t tile, kv_head, begin, end;
};

class AttentionPlan {
 public:
  // Throws Error naming the field if the batch is inconsistent or names slots outside the pool.
  void build(const DlBatch& batch, const DlPool& pool, int64_t num_heads, int threads);

  int64_t num_rows() const { return num_rows_; }
  const DlBatch& batch() const { return *batch_; }
  const std::vector<AttentionItem>& items() const { return items_; }
  const RowTile& tile(int64_t index) const { return tiles_[static_cast<size_t>(index)]; }
  const RowTile& tile_of_row(int64_t row) const { return tiles_[static_cast<size_t>(tile_of_row_[static_cast<size_t>(row)])]; }
  int64_t num_partials() const { return num_partials_; }
  // Rows of tiles that are not alone.
  const std::vector<int64_t>& joint_rows() const { return joint_rows_; }

  // Tiles of the pool's first layer that this thread will probably read, in order; other layers' stand layer_bytes apart.
  const std::vector<const uint8_t*>& likely_tiles(int thread) const { return likely_tiles_[static_cast<size_t>(thread)]; }

  bool is_tree(int64_t row) const {
    return batch_->tree_indptr != nullptr && batch_->tree_indptr[row + 1] > batch_->tree_indptr[row];
  }
  int64_t num_keys(int64_t row) const { return num_keys_[static_cast<size_t>(row)]; }
  // Keys before the request's own rows: shared by all of them, in the page table's order.
  int64_t prefix(int64_t request) const {
    return batch_->kv_lens[request] - (batch_->qo_indptr[request + 1] - batch_->qo_indptr[request]);
  }
  // Slot of key `index` of a row, counted in logical order.
  int64_t slot(int64_t request, int64_t row, int64_t index) const;
  // Pages are whole groups, so that a group of keys of a causal row is a tile of the pool.
  bool aligned() const { return batch_->page_size % kGroupKeys == 0; }

 private:
  void check(const DlBatch& batch, const DlPool& pool) const;
  void check_tree(const DlBatch& batch, int64_t request) const;
  void make_tiles(int64_t repeats);
  void make_items(int64_t kv_heads, int64_t repeats, int threads);
  void find_likely_tiles(const DlPool& pool, int threads);

  const DlBatch* batch_ = nullptr;
  int64_t num_rows_ = 0;
  int64_t num_partials_ = 0;
  std::vector<int64_t> num_keys_;
  std::vector<RowTile> tiles_;
  std::vector<int64_t> tile_of_row_;
  std::vector<AttentionItem> items_;
  std::vector<int64_t> joint_rows_;
  std::vector<std::vector<const uint8_t*>> likely_tiles_;
};

}  // namespace dl
