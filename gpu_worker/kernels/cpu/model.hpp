// A llama-family decoder bound to one instruction set: the forward pass over its weights.
#pragma once
#include <vector>

#include "attention_plan.hpp"
#include "draftline_cpu.h"
#include "isa.hpp"
#include "team.hpp"
#include "workspace.hpp"

struct DlModel {
  DlModel(const DlModelDesc& desc, const dl::Kernels& kernels);
  void forward(dl::Team& team, const DlPool& pool, const DlBatch& batch, float* hidden_out);

 private:
  // One thread's way through the layers.
  class Pass;

  void check(const DlPool& pool, const DlBatch& batch) const;
  void embed(int64_t row, float* to) const;

  const DlModelDesc desc_;
  const std::vector<DlLayer> layers_;
  const dl::Kernels& kernels_;

  // Of the pass that runs.
  const DlBatch* batch_ = nullptr;
  dl::AttentionPlan plan_;
  dl::Workspace workspace_;
};
