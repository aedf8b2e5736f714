#include "workspace.hpp"

#include <algorithm>

namespace dl {

namespace {

// Rows up to which every layer has memory of its own; beyond, the cost per row is small beside its products.
constexpr int64_t kFewRows = 16;
// Partial results of more than this are not worth a copy per layer.
constexpr int64_t kMostPartialBytes = int64_t{1} << 18;

}  // namespace

void Ring::reserve(int64_t pieces, int64_t bytes) {
  pieces_ = pieces;
  stride_ = round_up(bytes, 64);
  memory_.reserve(static_cast<size_t>(pieces_ * stride_));
}

void ActivationRing::reserve(int64_t pieces, int64_t rows, int64_t k, const Kernels& kernels) {
  rows_ = rows;
  const int64_t inputs = rows * round_up(k, kSlab);
  const int64_t integers = inputs + 3 * inputs / kHalf * 4, pairs = inputs / 2 * kernels.pair_bytes;
  ring_.reserve(pieces, std::max(integers, pairs));
}

Activations ActivationRing::at(int64_t index, int64_t k, int32_t format, int32_t group) const {
  Activations x{};
  x.kp = round_up(k, kSlab);
  x.group = group;
  x.as_pairs = format == DL_BF16;
  uint8_t* memory = ring_.at(index);
  if (x.as_pairs) {
    x.pairs = memory;
    return x;
  }
  const int64_t inputs = rows_ * x.kp;
  x.q = reinterpret_cast<int8_t*>(memory);
  x.scales = reinterpret_cast<float*>(memory + inputs);
  x.sums = x.scales + inputs / kHalf;
  x.offsets = reinterpret_cast<int32_t*>(x.sums + inputs / kHalf);
  return x;
}

void Workspace::reserve(const DlModelDesc& desc, const DlDraftInput* draft_input, const Kernels& kernels,
                        const AttentionPlan& plan, const DlPool& pool, int threads) {
  const int64_t rows = plan.num_rows(), q_width = desc.num_heads * desc.head_dim;
  int64_t widest = desc.hidden;
  if (draft_input != nullptr) {
    widest = std::max(2 * desc.hidden, draft_input->fuse == nullptr ? 0 : draft_input->fuse->k);
    fused.reserve(static_cast<size_t>(rows * desc.hidden * 4));
  }
  const int64_t layers = rows <= kFewRows ? desc.num_layers : 1;
  residuals_.reserve(rows <= kFewRows ? 2 * layers + 1 : 1, rows * desc.hidden * 4);
  qkvs_.reserve(layers, rows * (q_width + 2 * desc.num_kv_heads * desc.head_dim) * 4);
  shared_input.reserve(1, rows, widest, kernels);
  own_input.reserve(threads, std::min(rows, kFewRows), widest, kernels);
  o_input.reserve(layers, rows, q_width, kernels);
  down_input.reserve(layers, rows, desc.intermediate, kernels);
  queries.reserve(static_cast<size_t>(rows * q_width / 2 * kernels.pair_bytes));
  attended.reserve(static_cast<size_t>(rows * q_width * 4));
  normed_.reserve(threads, widest * 4);
  gates_.reserve(threads, kGateRows * 3 * kGateColumns * 4);
  num_partials_ = plan.num_partials();
  padded_ = pool.padded;
  const int64_t partial_bytes = num_partials_ * (padded_ + 2) * 4;
  partials_.reserve(partial_bytes <= kMostPartialBytes ? layers : 1, partial_bytes);
  attention_.resize(std::max(attention_.size(), static_cast<size_t>(threads)));
  for (auto& scratch : attention_) scratch.reserve(kernels, pool);
}

PartialResults Workspace::partials(int64_t layer) const {
  auto* memory = reinterpret_cast<float*>(partials_.at(layer));
  const int64_t outputs = num_partials_ * padded_;
  return {memory, memory + outputs, memory + outputs + num_partials_};
}

}  // namespace dl
