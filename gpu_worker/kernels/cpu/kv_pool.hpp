// The paged KV memory of the native path, in the layout that the attention kernel reads.
//
// Slots (page * page_size + offset) are grouped by 16 in the order of their numbers. The tile of a group and KV head
// is the group's keys, [head_dim / 2][16 slots][2] bfloat16, followed by its values, [8 slot pairs][padded][2], where
// padded is head_dim rounded up to 16. Lanes are slots in the one and dimensions in the other, so both products of
// attention run without reductions over lanes. Never written memory is zero.
#pragma once
#include <cstdint>

#include "memory.hpp"

struct DlPool {
  int64_t num_layers, num_slots, num_kv_heads, head_dim;
  int64_t padded;       // head_dim rounded up to 16
  int64_t key_bytes;    // of one tile's keys
  int64_t tile_bytes;
  int64_t group_bytes;  // of all KV heads of a group
  int64_t layer_bytes;
  dl::Memory data;

  DlPool(int64_t num_layers, int64_t num_slots, int64_t num_kv_heads, int64_t head_dim);

  uint8_t* tile(int64_t layer, int64_t group, int64_t kv_head) const {
    return data.data() + layer * layer_bytes + group * group_bytes + kv_head * tile_bytes;
  }
  // Stores one slot's key and value of one KV head, [head_dim] floats each, rounded to bfloat16.
  void write(int64_t layer, int64_t slot, int64_t kv_head, const float* key, const float* value) const;
  void read(int64_t layer, int64_t slot, int64_t kv_head, float* key, float* value) const;
  // Copies slot sources[i] to targets[i] in every layer, all sources being read first.
  void move(const int64_t* sources, const int64_t* targets, int64_t count) const;
};

namespace dl {

// Copies lane `from` of one tile to lane `to` of another.
void copy_lane(const DlPool& pool, const uint8_t* from_tile, int64_t from, uint8_t* to_tile, int64_t to);

}  // namespace dl
