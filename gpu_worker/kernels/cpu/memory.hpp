// Large zeroed memory on huge pages: weights and KV are read at memory speed, where 4 KiB pages cost a good part of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dl {

// Zeroed, 64-byte aligned memory; never-touched parts of large blocks cost nothing. Blocks of middling size share
// mappings, so that the weights of a small layer lie on huge pages too. Throws dl::Error when the system refuses.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // At least `bytes`; contents are lost when it grows.
  void reserve(size_t bytes) {
    if (bytes > size_) *this = Memory(bytes + bytes / 4);
  }

 private:
  std::shared_ptr<void> mapping_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dl
