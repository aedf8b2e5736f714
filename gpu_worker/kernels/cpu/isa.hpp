// What one instruction set offers: the table of kernels that each kernels_*.cpp fills and dispatch.cpp chooses from.
//
// Every kernel works on whole rows or on 16-column blocks, and a row's result depends neither on the other rows given
// with it nor on where a call begins and ends: sums run over inputs (or keys) in ascending order, one accumulator per
// lane, and lanes are added in one fixed tree.
#pragma once
#include <cstdint>

#include "formats.hpp"

namespace dl {

// Memory that is read soon: kernels that compute meanwhile fetch it into the caches, a few lines at every step.
struct Background {
  const uint8_t* const* piece;  // the one under way; all of piece_bytes
  const uint8_t* const* end;
  int64_t offset;  // added to every piece
  int64_t piece_bytes;
  int64_t done;            // bytes of *piece
  int64_t lines_per_step;  // of 64 bytes; a step is a slab of weights against a tile of rows
};

// Rows of activations, quantised for the integer formats or as pairs for BF16. Inputs k .. kp - 1 are zero.
struct Activations {
  int8_t* q;        // [rows, kp]
  float* scales;    // [rows, kp / 32]
  float* sums;      // [rows, kp / 32]: scale times the sum of the 32 quantised inputs
  int32_t* offsets;  // [rows, kp / 32]: -128 times that sum, without the scale
  uint8_t* pairs;   // [rows, kp / 2] of pair_bytes
  int64_t kp;       // a multiple of 64
  int32_t group;    // 32 or 64 inputs share one scale
  bool as_pairs;
  Background* background;  // of the thread that computes, or null
};

constexpr int kBlockKeys = 128;    // keys per attention block, counted from logical position 0
constexpr int kGroupKeys = 16;     // keys per tile of the KV pool
constexpr int kBlockGroups = kBlockKeys / kGroupKeys;
constexpr int kMaxPairs = 64;      // (row, query head) pairs that share one KV head in one call
constexpr int kMaxHeadDim = 512;

// One block of keys against some pairs.
struct AttentionBlock {
  const uint8_t* queries[kMaxPairs];  // head_dim / 2 pairs each, scaled by attention scale * log2(e)
  int32_t num_keys[kMaxPairs];        // visible keys of this block, 1..128
  int32_t num_pairs;
  int64_t head_dim;
  const uint8_t* keys[kBlockGroups];    // K tile of each group of 16 keys
  const uint8_t* values[kBlockGroups];  // V tile
  // Tiles (keys, then values) of the block that comes next, to be fetched from memory meanwhile.
  const uint8_t* next[kBlockGroups];
  int32_t num_next;
  float* scores;  // scratch [num_pairs, 128]
  uint8_t* weights;  // scratch [num_pairs, 64] of pair_bytes
  // The block's softmax relative to its own maximum: maximum, sum of weights, weighted sum of values.
  float* maximum;  // [num_pairs]
  float* total;    // [num_pairs]
  float* output;   // [num_pairs, head_dim rounded up to 16]
};

struct RotaryHead {
  const float* norm;  // [head_dim] or null
  float eps;
  int64_t head_dim, rotary_dim;
  const float* cos;  // [rotary_dim / 2] of the row's position
  const float* sin;
};

struct Kernels {
  const char* name;
  int64_t pair_bytes;
  int64_t tile_rows;  // rows per pass over the weights

  // out[row - row0, column] for rows row0 .. row0 + rows - 1 and column blocks block0 .. block1 - 1, `out` standing
  // at column block0 * 16; columns from view.n on are not written. Unless `add` is null, its elements are added.
  void (*linear)(const WeightView& view, int64_t block0, int64_t block1, const Activations& x, int64_t row0,
                 int64_t rows, const float* add, float* out, int64_t stride);

  // Asks for the cache lines of memory that is read, or written, soon: half of it was last used by another core, and
  // many lines asked for at once take hardly longer than one.
  void (*will_read)(const void* p, int64_t bytes);
  void (*will_write)(const void* p, int64_t bytes);

  // y = x / sqrt(mean(x^2) + eps) * weight.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* y);
  // Quantises n inputs of one row, from input k0 on (a multiple of 64); fills up to the next multiple of 64 with zeros.
  void (*quantise)(const float* x, int64_t k0, int64_t n, const Activations& to, int64_t row);
  // y = silu(gate) * up.
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);

  // Norm, rotation and scale of one query head into pairs; of one key head into floats.
  void (*rotate_query)(const float* x, const RotaryHead& head, float scale, uint8_t* pairs);
  void (*rotate_key)(const float* x, const RotaryHead& head, float* y);

  void (*attention_block)(const AttentionBlock& block);
  // Adds the results of one block to the running ones of `pairs` pairs; padded = head_dim rounded up to 16.
  void (*attention_merge)(int64_t pairs, float* maximum, float* total, float* output, const float* block_maximum,
                          const float* block_total, const float* block_output, int64_t padded);
  // out[head_dim] = output / total.
  void (*attention_finish)(float total, const float* output, int64_t head_dim, float* out);

  // Largest value of x[n] and its first index.
  void (*largest)(const float* x, int64_t n, float* value, int64_t* index);
  // Sum of exp(x - maximum) over x[n].
  float (*exp_sum)(const float* x, int64_t n, float maximum);
  // Merges two (maximum, sum of exp) results; the order of calls is the caller's.
  void (*merge_exp_sum)(float* maximum, float* total, float other_maximum, float other_total);
};

const Kernels* kernels_for(int32_t isa);  // null: not compiled in or not supported by this processor
int32_t best_isa();

}  // namespace dl
