#include "attention_plan.hpp"

#include <algorithm>
#include <string>

#include "error.hpp"

namespace dl {

namespace {

std::string number(int64_t value) { return std::to_string(value); }

// (row, head) pairs that a tile aims at: enough to use a loaded key well, few enough for the scratch to stay in cache.
constexpr int64_t kTargetPairs = 30;

// Items per thread below which a tile's blocks are shared out too.
constexpr int64_t kItemsPerThread = 4;

// Bytes of one layer's keys and values that are worth fetching ahead of attention: less is read in no time, more
// does not stay in the last cache.
constexpr int64_t kLeastFetched = int64_t{1} << 20;
constexpr int64_t kMostFetched = int64_t{12} << 20;

}  // namespace

void AttentionPlan::build(const DlBatch& batch, const DlPool& pool, int64_t num_heads, int threads) {
  check(batch, pool);
  batch_ = &batch;
  const int64_t repeats = num_heads / pool.num_kv_heads;
  num_rows_ = batch.qo_indptr[batch.num_requests];
  num_keys_.resize(static_cast<size_t>(num_rows_));
  for (int64_t b = 0; b < batch.num_requests; b++) {
    for (int64_t row = batch.qo_indptr[b]; row < batch.qo_indptr[b + 1]; row++) {
      num_keys_[static_cast<size_t>(row)] =
          prefix(b) + (is_tree(row) ? batch.tree_indptr[row + 1] - batch.tree_indptr[row] : row - batch.qo_indptr[b] + 1);
    }
  }
  make_tiles(repeats);
  make_items(pool.num_kv_heads, repeats, threads);
  find_likely_tiles(pool, threads);
}

void AttentionPlan::check(const DlBatch& batch, const DlPool& pool) const {
  require(batch.num_requests >= 0, "num_requests: " + number(batch.num_requests) + " is negative");
  require(batch.page_size >= 1, "page_size: " + number(batch.page_size) + " is not positive");
  require(batch.qo_indptr[0] == 0, "qo_indptr: begins with " + number(batch.qo_indptr[0]));
  require(batch.page_indptr[0] == 0, "page_indptr: begins with " + number(batch.page_indptr[0]));
  for (int64_t b = 0; b < batch.num_requests; b++) {
    const int64_t rows = int64_t{batch.qo_indptr[b + 1]} - batch.qo_indptr[b];
    const int64_t pages = int64_t{batch.page_indptr[b + 1]} - batch.page_indptr[b];
    const std::string request = " of request " + number(b);
    require(rows >= 0, "qo_indptr: falls at" + request);
    require(batch.kv_lens[b] >= rows, "kv_lens: " + number(batch.kv_lens[b]) + request + " is below its rows, " + number(rows));
    require(pages * batch.page_size >= batch.kv_lens[b],
            "page_indptr: " + number(pages) + " pages" + request + " do not hold " + number(batch.kv_lens[b]) + " keys");
    for (int64_t i = batch.page_indptr[b]; i < batch.page_indptr[b + 1]; i++) {
      const int64_t page = batch.page_indices[i];
      require(page >= 0 && (page + 1) * batch.page_size <= pool.num_slots,
              "page_indices: " + number(page) + request + " is outside the pool of " + number(pool.num_slots) + " slots");
    }
    if (batch.tree_indptr != nullptr) check_tree(batch, b);
  }
  const int64_t rows = batch.qo_indptr[batch.num_requests];
  for (int64_t i = 0; i < rows; i++) {
    require(batch.out_slots[i] >= 0 && batch.out_slots[i] < pool.num_slots,
            "out_slots: " + number(batch.out_slots[i]) + " of row " + number(i) + " is outside the pool");
  }
}

void AttentionPlan::check_tree(const DlBatch& batch, int64_t request) const {
  const int64_t row0 = batch.qo_indptr[request];
  for (int64_t row = row0; row < batch.qo_indptr[request + 1]; row++) {
    const int64_t begin = batch.tree_indptr[row], end = batch.tree_indptr[row + 1];
    require(begin >= 0 && end >= begin, "tree_indptr: falls at row " + number(row));
    require((begin == end) == (batch.tree_indptr[row0] == batch.tree_indptr[row0 + 1]),
            "tree_indptr: request " + number(request) + " mixes tree rows and causal rows");
    if (begin == end) continue;
    for (int64_t i = begin; i < end; i++) {
      const int64_t previous = i == begin ? -1 : int64_t{batch.tree_ancestors[i - 1]};
      require(batch.tree_ancestors[i] > previous && batch.tree_ancestors[i] <= row - row0,
              "tree_ancestors: row " + number(row) + " lists " + number(batch.tree_ancestors[i]));
    }
    require(batch.tree_ancestors[end - 1] == row - row0, "tree_ancestors: row " + number(row) + " does not see itself");
  }
}

void AttentionPlan::make_tiles(int64_t repeats) {
  const int64_t most = std::max<int64_t>(1, kTargetPairs / repeats);
  tiles_.clear();
  tile_of_row_.resize(static_cast<size_t>(num_rows_));
  for (int64_t b = 0; b < batch_->num_requests; b++) {
    const int64_t begin = batch_->qo_indptr[b], rows = batch_->qo_indptr[b + 1] - begin;
    const int64_t count = ceil_div(rows, most);
    for (int64_t t = 0; t < count; t++) {
      RowTile tile{b, begin + rows * t / count, 0, 0};
      tile.rows = begin + rows * (t + 1) / count - tile.row0;
      for (int64_t row = tile.row0; row < tile.row0 + tile.rows; row++) {
        tile.blocks = std::max(tile.blocks, ceil_div(num_keys(row), kBlockKeys));
        tile_of_row_[static_cast<size_t>(row)] = static_cast<int64_t>(tiles_.size());
      }
      tiles_.push_back(tile);
    }
  }
}

void AttentionPlan::make_items(int64_t kv_heads, int64_t repeats, int threads) {
  items_.clear();
  joint_rows_.clear();
  num_partials_ = 0;
  int64_t total = 0;
  for (const RowTile& tile : tiles_) total += tile.blocks * tile.rows * kv_heads;
  // A tile whose walk is long beside a thread's fair share would keep the others waiting: its blocks become items.
  const int64_t fair = std::max<int64_t>(1, total / (threads * kItemsPerThread));
  for (size_t i = 0; i < tiles_.size(); i++) {
    RowTile& tile = tiles_[i];
    const bool split = threads > 1 && tile.blocks > 1 && tile.blocks * tile.rows > fair;
    if (split) {
      tile.partial = num_partials_;
      num_partials_ += tile.blocks * tile.rows * repeats * kv_heads;
    }
    tile.alone = !split && tile.rows == batch_->qo_indptr[tile.request + 1] - batch_->qo_indptr[tile.request];
    for (int64_t row = tile.row0; !tile.alone && row < tile.row0 + tile.rows; row++) joint_rows_.push_back(row);
    for (int64_t head = 0; head < kv_heads; head++) {
      if (!split) items_.push_back({static_cast<int64_t>(i), head, 0, tile.blocks});
      for (int64_t block = 0; split && block < tile.blocks; block++) {
        items_.push_back({static_cast<int64_t>(i), head, block, block + 1});
      }
    }
  }
  std::stable_sort(items_.begin(), items_.end(), [this](const AttentionItem& a, const AttentionItem& b) {
    return (a.end - a.begin) * tile(a.tile).rows > (b.end - b.begin) * tile(b.tile).rows;
  });
}

void AttentionPlan::find_likely_tiles(const DlPool& pool, int threads) {
  likely_tiles_.resize(static_cast<size_t>(threads));
  for (auto& tiles : likely_tiles_) tiles.clear();
  if (!aligned()) return;
  const auto most = static_cast<size_t>(kMostFetched / threads / pool.tile_bytes);
  size_t found = 0;
  for (size_t i = 0; i < items_.size(); i++) {
    const AttentionItem& item = items_[i];
    const RowTile& rows = tile(item.tile);
    if (rows.row0 != batch_->qo_indptr[rows.request]) continue;  // another tile of the request reads the same
    auto& tiles = likely_tiles_[i % static_cast<size_t>(threads)];
    const int64_t end = std::min(item.end * kBlockKeys, prefix(rows.request));
    for (int64_t key = item.begin * kBlockKeys; key < end && tiles.size() < most; key += kGroupKeys, found++) {
      tiles.push_back(pool.tile(0, slot(rows.request, rows.row0, key) / kGroupKeys, item.kv_head));
    }
  }
  if (static_cast<int64_t>(found) * pool.tile_bytes >= kLeastFetched) return;
  for (auto& tiles : likely_tiles_) tiles.clear();
}

int64_t AttentionPlan::slot(int64_t request, int64_t row, int64_t index) const {
  const int64_t before = prefix(request);
  if (index >= before && is_tree(row)) index = before + batch_->tree_ancestors[batch_->tree_indptr[row] + index - before];
  const int64_t page = batch_->page_indices[batch_->page_indptr[request] + index / batch_->page_size];
  return page * batch_->page_size + index % batch_->page_size;
}

}  // namespace dl
