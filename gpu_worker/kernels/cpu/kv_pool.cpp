#include "kv_pool.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "error.hpp"
#include "isa.hpp"
#include "scalar.hpp"

namespace dl {

namespace {

constexpr int64_t kGroup = 16;

uint8_t* key_pair(uint8_t* tile, int64_t lane, int64_t i) { return tile + i * 64 + lane * 4; }

uint8_t* value_at(const DlPool& pool, uint8_t* tile, int64_t lane, int64_t i) {
  return tile + pool.key_bytes + lane / 2 * pool.padded * 4 + i * 4 + lane % 2 * 2;
}

void put(uint8_t* p, float value) {
  const uint16_t half = float_to_bf16(value);
  std::memcpy(p, &half, 2);
}

float get(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return bf16_to_float(half);
}

}  // namespace

void copy_lane(const DlPool& pool, const uint8_t* from_tile, int64_t from, uint8_t* to_tile, int64_t to) {
  auto* source = const_cast<uint8_t*>(from_tile);
  for (int64_t i = 0; i < pool.head_dim / 2; i++) std::memcpy(key_pair(to_tile, to, i), key_pair(source, from, i), 4);
  for (int64_t i = 0; i < pool.head_dim; i++) {
    std::memcpy(value_at(pool, to_tile, to, i), value_at(pool, source, from, i), 2);
  }
}

}  // namespace dl

using namespace dl;

DlPool::DlPool(int64_t layers, int64_t slots, int64_t kv_heads, int64_t dim)
    : num_layers(layers), num_slots(slots), num_kv_heads(kv_heads), head_dim(dim) {
  require(layers >= 1 && slots >= 1 && kv_heads >= 1, "pool: layers " + std::to_string(layers) + ", slots " +
                                                          std::to_string(slots) + ", kv_heads " +
                                                          std::to_string(kv_heads) + " must be positive");
  require(dim >= 2 && dim % 2 == 0 && dim <= kMaxHeadDim, "head_dim: " + std::to_string(dim) + " is not even or not in 2..512");
  // Far beyond any memory, and small enough for what follows not to overflow.
  const __int128 values = static_cast<__int128>(layers) * slots * kv_heads * dim;
  require(slots < int64_t{1} << 48 && values < int64_t{1} << 56, "pool: cannot allocate so many slots: " +
                                                                     std::to_string(slots) + " in each of " +
                                                                     std::to_string(layers) + " layers");
  padded = round_up(dim, 16);
  key_bytes = kGroup * 2 * dim;
  tile_bytes = kGroup * 2 * (dim + padded);
  group_bytes = tile_bytes * kv_heads;
  layer_bytes = ceil_div(slots, kGroup) * group_bytes;
  data = Memory(static_cast<size_t>(layers * layer_bytes));
}

void DlPool::write(int64_t layer, int64_t slot, int64_t kv_head, const float* key, const float* value) const {
  uint8_t* to = tile(layer, slot / kGroup, kv_head);
  const int64_t lane = slot % kGroup;
  for (int64_t i = 0; i < head_dim; i++) put(key_pair(to, lane, i / 2) + i % 2 * 2, key[i]);
  for (int64_t i = 0; i < head_dim; i++) put(value_at(*this, to, lane, i), value[i]);
}

void DlPool::read(int64_t layer, int64_t slot, int64_t kv_head, float* key, float* value) const {
  uint8_t* from = tile(layer, slot / kGroup, kv_head);
  const int64_t lane = slot % kGroup;
  for (int64_t i = 0; i < head_dim; i++) key[i] = get(key_pair(from, lane, i / 2) + i % 2 * 2);
  for (int64_t i = 0; i < head_dim; i++) value[i] = get(value_at(*this, from, lane, i));
}

void DlPool::move(const int64_t* sources, const int64_t* targets, int64_t count) const {
  for (int64_t i = 0; i < count; i++) {
    require(sources[i] >= 0 && sources[i] < num_slots && targets[i] >= 0 && targets[i] < num_slots,
            "slots: " + std::to_string(sources[i]) + " -> " + std::to_string(targets[i]) + " is not in 0.." +
                std::to_string(num_slots - 1));
  }
  // 16 moved slots take one scratch tile.
  std::vector<uint8_t> scratch(static_cast<size_t>(ceil_div(count, kGroup) * tile_bytes));
  for (int64_t layer = 0; layer < num_layers; layer++) {
    for (int64_t head = 0; head < num_kv_heads; head++) {
      for (int64_t i = 0; i < count; i++) {
        copy_lane(*this, tile(layer, sources[i] / kGroup, head), sources[i] % kGroup,
                  scratch.data() + i / kGroup * tile_bytes, i % kGroup);
      }
      for (int64_t i = 0; i < count; i++) {
        copy_lane(*this, scratch.data() + i / kGroup * tile_bytes, i % kGroup,
                  tile(layer, targets[i] / kGroup, head), targets[i] % kGroup);
      }
    }
  }
}
