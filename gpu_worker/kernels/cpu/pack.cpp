// Packing: float rows or GGUF blocks into the layouts of formats.hpp, and columns back out of them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "error.hpp"
#include "formats.hpp"
#include "scalar.hpp"

namespace dl {

namespace {

constexpr int64_t kQ4_0Bytes = 18, kQ4_1Bytes = 20, kQ8_0Bytes = 34;  // per GGUF block of 32

// Where the parts of one column lie in a slab.
uint8_t* lane_vector(uint8_t* slab, int64_t header, int64_t vector, int64_t lane) {
  return slab + header + vector * 64 + lane * 4;
}

uint16_t load16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

void store16(uint8_t* p, uint16_t value) { std::memcpy(p, &value, 2); }

int64_t header_bytes(int32_t format) {
  switch (format) {
    case DL_Q4_1: return 128;
    case DL_Q4_0:
    case DL_Q8_0: return 64;
    default: return 0;
  }
}

struct Column {
  uint8_t* block;  // first slab of the column's block
  int64_t lane;
  int64_t slab_size;
  uint8_t* slab(int64_t s) const { return block + s * slab_size; }
};

Column column_of(const DlLinear& linear, int64_t column) {
  return {linear.data.data() + column / kLanes * linear.block_bytes(), column % kLanes, slab_bytes(linear.format)};
}

void pack_q4(DlLinear& linear, const Column& to, const uint8_t* row, int32_t source) {
  const bool source_has_min = source == DL_FROM_Q4_1;
  const int64_t block = source_has_min ? kQ4_1Bytes : kQ4_0Bytes;
  const int64_t header = header_bytes(linear.format);
  for (int64_t b = 0; b < linear.k / kHalf; b++) {
    const uint8_t* from = row + b * block;
    uint8_t* slab = to.slab(b / 2);
    const int64_t half = b % 2;
    store16(slab + half * 32 + to.lane * 2, load16(from));
    if (linear.format == DL_Q4_1) {
      // Q4_0 is Q4_1 with minimum -8 d, which is exact: a power of two times d.
      const uint16_t minimum = source_has_min ? load16(from + 2) : float_to_f16(-8.0f * f16_to_float(load16(from)));
      store16(slab + 64 + half * 32 + to.lane * 2, minimum);
    }
    const uint8_t* nibbles = from + (source_has_min ? 4 : 2);
    for (int64_t i = 0; i < 4; i++) std::memcpy(lane_vector(slab, header, half * 4 + i, to.lane), nibbles + 4 * i, 4);
  }
}

void pack_q8_block(const Column& to, int64_t b, uint16_t scale, const int8_t* values) {
  uint8_t* slab = to.slab(b / 2);
  const int64_t half = b % 2;
  store16(slab + half * 32 + to.lane * 2, scale);
  for (int64_t i = 0; i < kHalf; i++) {
    lane_vector(slab, 64, half * 8 + i / 4, to.lane)[i % 4] = static_cast<uint8_t>(values[i] + 128);
  }
}

void pack_q8(DlLinear& linear, const Column& to, const uint8_t* row) {
  for (int64_t b = 0; b < linear.k / kHalf; b++) {
    const uint8_t* from = row + b * kQ8_0Bytes;
    pack_q8_block(to, b, load16(from), reinterpret_cast<const int8_t*>(from + 2));
  }
}

float largest(const float* x, int64_t n) {
  float result = 0.0f;
  for (int64_t i = 0; i < n; i++) result = std::max(result, std::fabs(x[i]));
  return result;
}

int8_t to_int8(float value) {
  return static_cast<int8_t>(std::clamp(std::nearbyint(value), -127.0f, 127.0f));
}

void pack_float(DlLinear& linear, const Column& to, int64_t column, const float* row) {
  const int64_t k = linear.k;
  if (linear.format == DL_BF16) {
    for (int64_t i = 0; i < k; i++) {
      uint8_t* pair = lane_vector(to.slab(i / kSlab), 0, i % kSlab / 2, to.lane);
      store16(pair + i % 2 * 2, float_to_bf16(row[i]));
    }
  } else if (linear.format == DL_W8) {
    const float scale = largest(row, k) / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    linear.column_scales[static_cast<size_t>(column)] = scale;
    for (int64_t i = 0; i < k; i++) {
      lane_vector(to.slab(i / kSlab), 0, i % kSlab / 4, to.lane)[i % 4] =
          static_cast<uint8_t>(to_int8(row[i] * inverse) + 128);
    }
  } else {  // Q8_0: the scale is a half, so values are divided by what it became
    for (int64_t b = 0; b < ceil_div(k, kHalf); b++) {
      const int64_t count = std::min(kHalf, k - b * kHalf);
      const uint16_t scale = float_to_f16(largest(row + b * kHalf, count) / 127.0f);
      const float stored = f16_to_float(scale);
      int8_t values[kHalf] = {};
      for (int64_t i = 0; i < count && stored > 0.0f; i++) values[i] = to_int8(row[b * kHalf + i] / stored);
      pack_q8_block(to, b, scale, values);
    }
  }
}

bool accepts(int32_t format, int32_t source) {
  switch (source) {
    case DL_FROM_FLOAT32: return format == DL_W8 || format == DL_Q8_0 || format == DL_BF16;
    case DL_FROM_Q4_0: return format == DL_Q4_0 || format == DL_Q4_1;
    case DL_FROM_Q4_1: return format == DL_Q4_1;
    case DL_FROM_Q8_0: return format == DL_Q8_0;
    default: return false;
  }
}

int64_t source_row_bytes(int32_t source, int64_t k) {
  switch (source) {
    case DL_FROM_Q4_0: return k / kHalf * kQ4_0Bytes;
    case DL_FROM_Q4_1: return k / kHalf * kQ4_1Bytes;
    case DL_FROM_Q8_0: return k / kHalf * kQ8_0Bytes;
    default: return k * 4;
  }
}

}  // namespace

void check_group(int32_t format, int32_t group) {
  require(group == 32 || group == 64, "activation_group: " + std::to_string(group) + " is neither 32 nor 64");
  require(format != DL_W8 || group == 64,
          "activation_group: weights W8 need groups of 64, not " + std::to_string(group));
}

DlLinear* create_linear(int32_t format, int64_t n, int64_t k) {
  require(format >= DL_W8 && format <= DL_BF16, "format: " + std::to_string(format) + " is unknown");
  require(n >= 1 && k >= 1, "linear: n " + std::to_string(n) + " and k " + std::to_string(k) + " must be positive");
  auto linear = std::make_unique<DlLinear>();
  linear->format = format;
  linear->n = n;
  linear->k = k;
  linear->blocks = ceil_div(n, kLanes);
  linear->slabs = ceil_div(k, kSlab);
  linear->data = Memory(static_cast<size_t>(linear->blocks * linear->block_bytes()));
  if (format == DL_W8) linear->column_scales.assign(static_cast<size_t>(linear->blocks * kLanes), 0.0f);
  return linear.release();
}

void pack(DlLinear& linear, int32_t source, const uint8_t* data, int64_t rows, int64_t row_bytes, int64_t column0,
          int64_t stride) {
  require(accepts(linear.format, source), "format " + std::to_string(linear.format) + " cannot be packed from source " +
                                              std::to_string(source));
  require(source == DL_FROM_FLOAT32 || linear.k % kHalf == 0,
          "k: " + std::to_string(linear.k) + " is not a multiple of the block of 32");
  require(row_bytes >= source_row_bytes(source, linear.k), "row_bytes: " + std::to_string(row_bytes) + " is too small");
  const int64_t last = column0 + (rows - 1) / kLanes * kLanes * stride + (rows - 1) % kLanes;
  require(rows >= 1 && column0 >= 0 && stride >= 1 && last < linear.n,
          "columns: up to " + std::to_string(last) + " of " + std::to_string(linear.n));
  for (int64_t j = 0; j < rows; j++) {
    const int64_t column = column0 + j / kLanes * kLanes * stride + j % kLanes;
    const Column to = column_of(linear, column);
    const uint8_t* row = data + j * row_bytes;
    if (source == DL_FROM_FLOAT32) {
      pack_float(linear, to, column, reinterpret_cast<const float*>(row));
    } else if (source == DL_FROM_Q8_0) {
      pack_q8(linear, to, row);
    } else {
      pack_q4(linear, to, row, source);
    }
  }
}

DlLinear* select_columns(const DlLinear& linear, const int64_t* columns, int64_t count) {
  std::unique_ptr<DlLinear> result(create_linear(linear.format, count, linear.k));
  const int64_t header = header_bytes(linear.format);
  const int64_t vectors = (slab_bytes(linear.format) - header) / 64;
  if (!linear.bias.empty()) result->bias.assign(static_cast<size_t>(result->blocks * kLanes), 0.0f);
  for (int64_t j = 0; j < count; j++) {
    require(columns[j] >= 0 && columns[j] < linear.n,
            "columns: " + std::to_string(columns[j]) + " is not in 0.." + std::to_string(linear.n - 1));
    const Column from = column_of(linear, columns[j]), to = column_of(*result, j);
    for (int64_t s = 0; s < linear.slabs; s++) {
      for (int64_t h = 0; h < header; h += 32) {
        std::memcpy(to.slab(s) + h + to.lane * 2, from.slab(s) + h + from.lane * 2, 2);
      }
      for (int64_t v = 0; v < vectors; v++) {
        std::memcpy(lane_vector(to.slab(s), header, v, to.lane), lane_vector(from.slab(s), header, v, from.lane), 4);
      }
    }
    const auto source = static_cast<size_t>(columns[j]), target = static_cast<size_t>(j);
    if (linear.format == DL_W8) result->column_scales[target] = linear.column_scales[source];
    if (!linear.bias.empty()) result->bias[target] = linear.bias[source];
  }
  return result.release();
}

void dequantise_column(const DlLinear& linear, int64_t column, float* out) {
  const Column from = column_of(linear, column);
  const int64_t header = header_bytes(linear.format);
  for (int64_t s = 0; s < linear.slabs; s++) {
    uint8_t* slab = from.slab(s);
    const int64_t count = std::min(kSlab, linear.k - s * kSlab);
    float* to = out + s * kSlab;
    if (linear.format == DL_BF16) {
      for (int64_t i = 0; i < count; i++) to[i] = bf16_to_float(load16(lane_vector(slab, 0, i / 2, from.lane) + i % 2 * 2));
    } else if (linear.format == DL_W8 || linear.format == DL_Q8_0) {
      for (int64_t i = 0; i < count; i++) {
        const float scale = linear.format == DL_W8 ? linear.column_scales[static_cast<size_t>(column)]
                                                   : f16_to_float(load16(slab + i / kHalf * 32 + from.lane * 2));
        to[i] = scale * static_cast<float>(lane_vector(slab, header, i / 4, from.lane)[i % 4] - 128);
      }
    } else {
      for (int64_t i = 0; i < count; i++) {
        const int64_t half = i / kHalf, j = i % kHalf;
        const uint8_t byte = lane_vector(slab, header, half * 4 + j % 16 / 4, from.lane)[j % 4];
        const float q = static_cast<float>(j < 16 ? byte & 15 : byte >> 4);
        const float scale = f16_to_float(load16(slab + half * 32 + from.lane * 2));
        to[i] = linear.format == DL_Q4_1 ? scale * q + f16_to_float(load16(slab + 64 + half * 32 + from.lane * 2))
                                         : scale * (q - 8.0f);
      }
    }
  }
}

}  // namespace dl
