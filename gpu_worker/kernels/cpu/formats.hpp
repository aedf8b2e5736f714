// How packed weights lie in memory. Blocks of 16 output columns; within a block, slabs of 64 inputs one after another.
//
// A lane is a column: a 64-byte vector holds 4 inputs (or 2 bfloat16 inputs) of each of the 16 columns, next to each
// other, as the dot-product instructions take them. Slabs (sizes in bytes):
//   W8    16 vectors of 4 inputs, int8 + 128
//   Q4_0  scales f16 [2][16]; for both halves of 32 inputs 4 vectors: vector i holds inputs 4i..4i+3 in the low
//         nibbles and 16+4i..16+4i+3 in the high ones, value + 8: a GGUF block's bytes, four at a time
//   Q4_1  scales f16 [2][16], minima f16 [2][16], then as Q4_0 (unsigned nibbles)
//   Q8_0  scales f16 [2][16], then 16 vectors of 4 inputs, int8 + 128
//   BF16  32 vectors of 2 inputs
// Weights are unsigned so that they stand on the unsigned side of vpdpbusd; the offset is undone with the sum of the
// activations, which is known per row, so that no compensation has to be read with the weights.
#pragma once
#include <cstdint>
#include <vector>

#include "draftline_cpu.h"
#include "memory.hpp"

namespace dl {

constexpr int64_t kLanes = 16;
constexpr int64_t kSlab = 64;   // inputs per slab
constexpr int64_t kHalf = 32;   // inputs per quantisation block of the GGUF formats

constexpr int64_t slab_bytes(int32_t format) {
  switch (format) {
    case DL_W8: return 1024;
    case DL_Q4_0: return 64 + 512;
    case DL_Q4_1: return 128 + 512;
    case DL_Q8_0: return 64 + 1024;
    default: return 2048;  // BF16
  }
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// What a kernel needs of a linear; plain pointers into a DlLinear.
struct WeightView {
  const uint8_t* data;
  const float* column_scales;  // W8: [blocks * 16]
  const float* bias;           // [blocks * 16] or null
  int64_t block_bytes;
  int64_t slabs;
  int64_t n;
  int32_t format;
};

}  // namespace dl

struct DlLinear {
  int32_t format;
  int64_t n, k;
  int64_t blocks, slabs;
  dl::Memory data;
  std::vector<float> column_scales;
  std::vector<float> bias;

  int64_t block_bytes() const { return slabs * dl::slab_bytes(format); }
  dl::WeightView view() const {
    return {data.data(),   format == DL_W8 ? column_scales.data() : nullptr,
            bias.empty() ? nullptr : bias.data(), block_bytes(), slabs, n, format};
  }
};

namespace dl {

DlLinear* create_linear(int32_t format, int64_t n, int64_t k);
void pack(DlLinear& linear, int32_t source, const uint8_t* data, int64_t rows, int64_t row_bytes, int64_t column0,
          int64_t stride);
DlLinear* select_columns(const DlLinear& linear, const int64_t* columns, int64_t count);
// Throws Error unless activations in groups of `group` inputs can meet weights of `format`.
void check_group(int32_t format, int32_t group);
// One column's weights, [k].
void dequantise_column(const DlLinear& linear, int64_t column, float* out);

}  // namespace dl
