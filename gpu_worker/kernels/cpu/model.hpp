// A llama-family decoder bound to one instruction set: descriptors of its weights and the buffers of a forward pass.
#pragma once
#include <memory>
#include <vector>

#include "attention.hpp"
#include "draftline_cpu.h"
#include "formats.hpp"
#include "isa.hpp"
#include "team.hpp"

namespace dl {

// Quantised activations of up to `rows` rows in memory of their own.
class ActivationBuffer {
 public:
  // Activations of inputs `k`, as the linear that reads them needs them.
  Activations reserve(int64_t rows, int64_t k, int32_t format, int32_t group, const Kernels& kernels);

 private:
  Memory memory_;
};

// The linear in units of work: blocks of columns times chunks of rows.
struct LinearWork {
  LinearWork(const DlLinear& linear, int64_t rows);
  int64_t items() const { return blocks * chunks; }
  void run(const Kernels& kernels, const Activations& x, float* out, int64_t out_stride, Epilogue epilogue,
           int64_t item) const;

  WeightView view;
  int64_t rows, blocks, chunks;
};

// Throws Error unless `x` in groups of `group` can meet weights of `format`.
void check_group(int32_t format, int32_t group);

}  // namespace dl

struct DlModel {
  DlModel(const DlModelDesc& desc, const dl::Kernels& kernels);
  void forward(dl::Team& team, const DlPool& pool, const DlBatch& batch, float* hidden_out);

 private:
  void check(const DlPool& pool, const DlBatch& batch) const;
  void reserve(int64_t rows, int threads, const DlPool& pool);
  void work(dl::Worker& worker, const DlPool& pool, float* hidden_out);
  void attend(dl::Worker& worker, const DlPool& pool, int64_t layer, const dl::Activations& to);
  void embed(int64_t row) const;
  // Brings the activations of a pass over few rows near: half of them lie in another core's cache.
  void fetch(const dl::Activations& x) const;
  void rotate(const DlPool& pool, int64_t layer, int64_t row, int64_t kv_head) const;
  void gate_up(const DlLayer& layer, const dl::Activations& x, const dl::Activations& to, int64_t item,
               float* scratch) const;
  const float* row_of(const dl::Memory& buffer, int64_t row, int64_t width) const {
    return buffer.as<float>() + row * width;
  }

  const DlModelDesc desc_;
  const std::vector<DlLayer> layers_;
  const dl::Kernels& kernels_;

  // Of the pass that runs.
  const DlBatch* batch_ = nullptr;
  dl::AttentionPlan plan_;
  dl::Memory residual_, qkv_, queries_, attended_, normed_, gated_;
  dl::ActivationBuffer qkv_input_, o_input_, mlp_input_, down_input_;
  dl::PartialResults partials_;
  std::vector<dl::AttentionScratch> scratch_;
  int64_t rows_ = 0, threads_ = 1;
};
