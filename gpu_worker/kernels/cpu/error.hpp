// The error that C++ code throws and api.cpp turns into a return value and dl_last_error().
#pragma once
#include <stdexcept>
#include <string>

namespace dl {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool condition, const std::string& message) {
  if (!condition) throw Error(message);
}

}  // namespace dl
