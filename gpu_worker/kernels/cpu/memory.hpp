// Large zeroed memory on huge pages: weights and KV are read at memory speed, where 4 KiB pages cost a quarter of it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dl {

// Zeroed, 64-byte aligned; large blocks are aligned to 2 MiB and ask for transparent huge pages.
// Never-touched memory costs nothing. Throws dl::Error when the system refuses.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // At least `bytes`; contents are lost when it grows.
  void reserve(size_t bytes);

 private:
  void release();
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace dl
