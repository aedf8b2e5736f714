#include "memory.hpp"

#include <sys/mman.h>

#include <string>
#include <utility>

#include "error.hpp"

namespace dl {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Memory::Memory(size_t bytes) {
  if (bytes == 0) return;
  const size_t extra = bytes >= kHugePage ? kHugePage : 0;
  mapping_bytes_ = bytes + extra;
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw Error("cannot allocate " + std::to_string(bytes) + " bytes");
  }
  auto address = reinterpret_cast<uintptr_t>(mapping_);
  if (extra != 0) {
    address = (address + kHugePage - 1) / kHugePage * kHugePage;
    madvise(reinterpret_cast<void*>(address), bytes, MADV_HUGEPAGE);  // a refusal only costs speed
  }
  data_ = reinterpret_cast<uint8_t*>(address);
  size_ = bytes;
}

Memory::~Memory() { release(); }

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapping_bytes_ = std::exchange(other.mapping_bytes_, 0);
  }
  return *this;
}

void Memory::reserve(size_t bytes) {
  if (bytes > size_) {
    release();
    *this = Memory(bytes + bytes / 4);
  }
}

void Memory::release() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
  mapping_ = nullptr;
  data_ = nullptr;
  size_ = mapping_bytes_ = 0;
}

}  // namespace dl
