// The memory of a forward pass between its weights and its KV.
//
// Writing a cache line that another core has read costs a message to that core, one line after the other, and between
// two core complexes some 100 ns each. So a pass over few rows gives every layer lines of its own: by the time a step
// comes back to them, the weights that went through the caches meanwhile have pushed them out.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "draftline_cpu.h"
#include "isa.hpp"

namespace dl {

// Equal pieces of memory, used in turn.
class Ring {
 public:
  void reserve(int64_t pieces, int64_t bytes);
  uint8_t* at(int64_t index) const { return memory_.data() + index % pieces_ * stride_; }

 private:
  Memory memory_;
  int64_t pieces_ = 1, stride_ = 0;
};

// Room for the quantised activations of some rows and inputs, whichever kind of weights they meet.
class ActivationRing {
 public:
  void reserve(int64_t pieces, int64_t rows, int64_t k, const Kernels& kernels);
  // Of rows of k inputs, at most those that were reserved.
  Activations at(int64_t index, int64_t k, int32_t format, int32_t group) const;

 private:
  Ring ring_;
  int64_t rows_ = 0;
};

// Columns of gate and of up that are computed together: one slab of the down projection's inputs.
constexpr int64_t kGateColumns = 64;
// Rows per pass over those columns' weights: their activations and results stay in the first-level cache.
constexpr int64_t kGateRows = 24;

struct Workspace {
  // draft_input may be null.
  void reserve(const DlModelDesc& desc, const DlDraftInput* draft_input, const Kernels& kernels,
               const AttentionPlan& plan, const DlPool& pool, int threads);

  // The residual stream before half-layer `index`: attention of layer i is 2 i, its MLP 2 i + 1. [rows, hidden]
  float* residual(int64_t index) const { return reinterpret_cast<float*>(residuals_.at(index)); }
  float* qkv(int64_t layer) const { return reinterpret_cast<float*>(qkvs_.at(layer)); }  // [rows, qkv width]
  PartialResults partials(int64_t layer) const;
  // A row that is about to be quantised: [hidden], of a draft head [2 * hidden]
  float* normed(int thread) const { return reinterpret_cast<float*>(normed_.at(thread)); }
  float* gate(int thread) const { return reinterpret_cast<float*>(gates_.at(thread)); }
  AttentionScratch& attention(int thread) { return attention_[static_cast<size_t>(thread)]; }

  // Inputs of qkv, of gate and up, and of what precedes a draft head's layers: [rows] for all, or of each thread alone.
  ActivationRing shared_input, own_input;
  ActivationRing o_input, down_input;
  Memory queries;   // [rows, heads, head_dim / 2] pairs
  Memory attended;  // [rows, heads * head_dim] floats
  Memory fused;     // of a draft head: [rows, hidden] floats

 private:
  Ring residuals_, qkvs_, partials_, normed_, gates_;
  int64_t num_partials_ = 0, padded_ = 0;
  std::vector<AttentionScratch> attention_;
};

}  // namespace dl
