// A packed linear over some rows, cut into items that threads share out.
#pragma once
#include "formats.hpp"
#include "isa.hpp"

namespace dl {

// Chunks of rows whose activations stay in the second-level cache while a block of columns passes over them. From
// kHalvedRows on there are two at least, so that threads share out rows: activations then stay with the core that made
// them, which is worth more than reading the weights once.
struct RowChunks {
  static constexpr int64_t kHalvedRows = 24, kMostRows = 256;
  explicit RowChunks(int64_t num_rows)
      : rows(num_rows), count(num_rows < kHalvedRows ? 1 : num_rows <= kMostRows ? 2 : ceil_div(num_rows, kMostRows)) {}
  int64_t begin(int64_t chunk) const { return rows * chunk / count; }
  int64_t end(int64_t chunk) const { return rows * (chunk + 1) / count; }
  int64_t rows, count;
};

// Items are blocks of 16 columns times chunks of rows.
struct LinearWork {
  LinearWork(const DlLinear& linear, int64_t rows) : view(linear.view()), blocks(linear.blocks), chunks(rows) {}
  int64_t items() const { return blocks * chunks.count; }

  // out = products, plus `add` unless that is null; both [rows, stride], and may be the same.
  void run(const Kernels& kernels, const Activations& x, const float* add, float* out, int64_t stride,
           int64_t item) const {
    const int64_t chunk = item / blocks, block = item % blocks, row = chunks.begin(chunk);
    const int64_t at = row * stride + block * kLanes;
    kernels.linear(view, block, block + 1, x, row, chunks.end(chunk) - row, add == nullptr ? nullptr : add + at,
                   out + at, stride);
  }

  WeightView view;
  int64_t blocks;
  RowChunks chunks;
};

}  // namespace dl
