#include "attention.hpp"

#include <algorithm>
#include <limits>

namespace dl {

void AttentionScratch::reserve(const Kernels& kernels, const DlPool& pool) {
  const size_t pairs = kMaxPairs, padded = static_cast<size_t>(pool.padded);
  const size_t floats = pairs * (kBlockKeys + 4 + 2 * padded);
  const size_t weights = pairs * (kBlockKeys / 2) * static_cast<size_t>(kernels.pair_bytes);
  memory_.reserve(floats * 4 + weights + static_cast<size_t>(kBlockGroups * pool.tile_bytes) + 64);
  scores_ = memory_.as<float>();
  output_ = scores_ + pairs * kBlockKeys;
  block_output_ = output_ + pairs * padded;
  maximum_ = block_output_ + pairs * padded;
  total_ = maximum_ + pairs;
  block_maximum_ = total_ + pairs;
  block_total_ = block_maximum_ + pairs;
  weights_ = reinterpret_cast<uint8_t*>(block_total_ + pairs);
  tiles_ = weights_ + weights;
}

LayerAttention::LayerAttention(const AttentionPlan& plan, const Kernels& kernels, const DlPool& pool, int64_t layer,
                               int64_t num_heads, const uint8_t* queries, const PartialResults& partials,
                               float* out)
    : plan_(plan),
      kernels_(kernels),
      pool_(pool),
      layer_(layer),
      num_heads_(num_heads),
      repeats_(num_heads / pool.num_kv_heads),
      padded_(pool.padded),
      queries_(queries),
      partials_(partials),
      out_(out),
      aligned_(aligned(num_heads, pool)) {}

void LayerAttention::run(int64_t index, int64_t likely_next, AttentionScratch& scratch, const Activations& to) const {
  const auto& items = plan_.items();
  const AttentionItem& item = items[static_cast<size_t>(index)];
  const RowTile& tile = plan_.tile(item.tile);
  AttentionBlock call;
  call.head_dim = pool_.head_dim;
  call.scores = scratch.scores_;
  call.weights = scratch.weights_;
  call.maximum = scratch.block_maximum_;
  call.total = scratch.block_total_;
  call.output = scratch.block_output_;
  const int64_t pairs = tile.rows * repeats_;
  std::fill_n(scratch.maximum_, pairs, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.total_, pairs, 0.0f);
  std::fill_n(scratch.output_, pairs * padded_, 0.0f);
  const int64_t row_end = tile.row0 + tile.rows;
  const bool tree = plan_.is_tree(tile.row0);
  for (int64_t block = item.begin; block < item.end; block++) {
    if (block + 1 < item.end) {
      announce(tile, item.kv_head, block + 1, call);
    } else if (likely_next < static_cast<int64_t>(items.size())) {
      const AttentionItem& next = items[static_cast<size_t>(likely_next)];
      announce(plan_.tile(next.tile), next.kv_head, next.begin, call);
    } else {
      call.num_next = 0;
    }
    const bool shared = !tree || (block + 1) * kBlockKeys <= plan_.prefix(tile.request);
    if (shared) {
      // Causal rows see ever more keys: those that reach this block are the last ones.
      int64_t row = tile.row0;
      while (row < row_end && plan_.num_keys(row) <= block * kBlockKeys) row++;
      run_block(item, tile, block, row, row_end - row, call, scratch);
    } else {
      for (int64_t row = tile.row0; row < row_end; row++) {
        if (plan_.num_keys(row) > block * kBlockKeys) run_block(item, tile, block, row, 1, call, scratch);
      }
    }
  }
  if (tile.partial >= 0) return;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t row = tile.row0 + pair / repeats_, head = item.kv_head * repeats_ + pair % repeats_;
    finish(row, head, scratch.total_[pair], scratch.output_ + pair * padded_);
  }
  for (int64_t row = tile.row0; row < row_end; row++) quantise(row, item.kv_head, to);
}

void LayerAttention::finish(int64_t row, int64_t head, float total, const float* output) const {
  kernels_.attention_finish(total, output, pool_.head_dim, out_ + (row * num_heads_ + head) * pool_.head_dim);
}

void LayerAttention::quantise(int64_t row, int64_t kv_head, const Activations& to) const {
  if (!aligned_) return;
  const int64_t width = repeats_ * pool_.head_dim, first = kv_head * width;
  kernels_.quantise(out_ + row * num_heads_ * pool_.head_dim + first, first, width, to, row);
}

void LayerAttention::run_block(const AttentionItem& item, const RowTile& tile, int64_t block, int64_t row,
                               int64_t rows, AttentionBlock& call, AttentionScratch& scratch) const {
  const int64_t query_bytes = pool_.head_dim / 2 * kernels_.pair_bytes;
  call.num_pairs = static_cast<int32_t>(rows * repeats_);
  for (int64_t pair = 0; pair < rows * repeats_; pair++) {
    const int64_t r = row + pair / repeats_, head = item.kv_head * repeats_ + pair % repeats_;
    call.queries[pair] = queries_ + (r * num_heads_ + head) * query_bytes;
    call.num_keys[pair] = static_cast<int32_t>(std::min<int64_t>(kBlockKeys, plan_.num_keys(r) - block * kBlockKeys));
  }
  place_groups(tile, item.kv_head, block, row, call.num_keys[rows * repeats_ - 1], call, scratch);
  kernels_.attention_block(call);
  if (tile.partial < 0) {
    const int64_t state = (row - tile.row0) * repeats_;
    kernels_.attention_merge(rows * repeats_, scratch.maximum_ + state, scratch.total_ + state,
                             scratch.output_ + state * padded_, scratch.block_maximum_, scratch.block_total_,
                             scratch.block_output_, padded_);
    return;
  }
  for (int64_t pair = 0; pair < rows * repeats_; pair++) {
    const int64_t head = item.kv_head * repeats_ + pair % repeats_;
    const int64_t index = partial_index(tile, row + pair / repeats_, head, block);
    partials_.maximum[index] = scratch.block_maximum_[pair];
    partials_.total[index] = scratch.block_total_[pair];
    std::copy_n(scratch.block_output_ + pair * padded_, padded_, partials_.output + index * padded_);
  }
}

// Points at the tiles of a block's keys; groups that do not lie in one tile of the pool are copied together first.
void LayerAttention::place_groups(const RowTile& tile, int64_t kv_head, int64_t block, int64_t row, int64_t keys,
                                  AttentionBlock& call, AttentionScratch& scratch) const {
  const int64_t in_place = keys_in_place(tile.request, row);
  for (int64_t g = 0; g < ceil_div(keys, kGroupKeys); g++) {
    const int64_t first = block * kBlockKeys + g * kGroupKeys;
    const uint8_t* source;
    if (first + kGroupKeys <= in_place) {
      source = pool_.tile(layer_, plan_.slot(tile.request, row, first) / kGroupKeys, kv_head);
    } else {
      uint8_t* copy = scratch.tiles_ + g * pool_.tile_bytes;
      for (int64_t lane = 0; lane < std::min<int64_t>(kGroupKeys, keys - g * kGroupKeys); lane++) {
        const int64_t slot = plan_.slot(tile.request, row, first + lane);
        copy_lane(pool_, pool_.tile(layer_, slot / kGroupKeys, kv_head), slot % kGroupKeys, copy, lane);
      }
      source = copy;
    }
    call.keys[g] = source;
    call.values[g] = source + pool_.key_bytes;
  }
}

int64_t LayerAttention::keys_in_place(int64_t request, int64_t row) const {
  if (!plan_.aligned()) return 0;
  return plan_.is_tree(row) ? plan_.prefix(request) : std::numeric_limits<int64_t>::max();
}

// Names the tiles of a block that comes next, as far as they lie in the pool.
void LayerAttention::announce(const RowTile& tile, int64_t kv_head, int64_t block, AttentionBlock& call) const {
  const int64_t row = tile.row0 + tile.rows - 1;
  const int64_t end = std::min(keys_in_place(tile.request, row), plan_.num_keys(row));
  call.num_next = 0;
  for (int64_t first = block * kBlockKeys; first < end && call.num_next < kBlockGroups; first += kGroupKeys) {
    call.next[call.num_next++] = pool_.tile(layer_, plan_.slot(tile.request, row, first) / kGroupKeys, kv_head);
  }
}

void LayerAttention::merge(int64_t row, int64_t kv_head, AttentionScratch& scratch, const Activations& to) const {
  const RowTile& tile = plan_.tile_of_row(row);
  if (tile.partial < 0) return;
  for (int64_t head = kv_head * repeats_; head < (kv_head + 1) * repeats_; head++) {
    float maximum = -std::numeric_limits<float>::infinity(), total = 0.0f;
    std::fill_n(scratch.output_, padded_, 0.0f);
    for (int64_t block = 0; block < ceil_div(plan_.num_keys(row), kBlockKeys); block++) {
      const int64_t index = partial_index(tile, row, head, block);
      kernels_.attention_merge(1, &maximum, &total, scratch.output_, partials_.maximum + index,
                               partials_.total + index, partials_.output + index * padded_, padded_);
    }
    finish(row, head, total, scratch.output_);
  }
  quantise(row, kv_head, to);
}

}  // namespace dl
