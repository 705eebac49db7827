// Describes each field of a struct as the compiler lays it out: "EpLayer.top_k=24 8 i64" gives
// offset, bytes and kind. `ep_runtime/native_abi.py` writes the same lines for Python's structs.
#ifndef EP_RUNTIME_FFI_STRUCT_LINES_H_
#define EP_RUNTIME_FFI_STRUCT_LINES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace ep_runtime {

// The kind of a type: "i" and "u" with bits, "p" for pointers, "v" for void, "s" with bytes for
// structs. The kind of a function has its result and arguments: "i64(p,i32)".
template <typename T>
struct KindOf {
  static std::string Text() {
    if constexpr (std::is_void_v<T>) {
      return "v";
    } else if constexpr (std::is_integral_v<T>) {
      const bool has_sign = std::is_signed_v<T> && !std::is_same_v<T, char>;
      return (has_sign ? "i" : "u") + std::to_string(8 * sizeof(T));
    } else {
      static_assert(std::is_class_v<T>, "a kind that Python's structs do not have");
      return "s" + std::to_string(sizeof(T));
    }
  }
};

template <typename T>
struct KindOf<std::atomic<T>> : KindOf<T> {};

template <typename T>
struct KindOf<T*> {
  static std::string Text() { return "p"; }
};

template <typename T, size_t size>
struct KindOf<T[size]> {
  static std::string Text() { return KindOf<T>::Text() + "[" + std::to_string(size) + "]"; }
};

template <typename Result, typename... Arguments>
struct KindOf<Result (*)(Arguments...)> {
  static std::string Text() {
    std::string text;
    ((text += (text.empty() ? "" : ",") + KindOf<Arguments>::Text()), ...);
    return KindOf<Result>::Text() + "(" + text + ")";
  }
};

template <typename Struct>
std::string SizeLine(const char* name) {
  return std::string(name) + "=" + std::to_string(sizeof(Struct)) + "\n";
}

template <typename Field>
std::string FieldLine(const char* name, size_t offset) {
  return std::string(name) + "=" + std::to_string(offset) + " " + std::to_string(sizeof(Field)) +
         " " + KindOf<Field>::Text() + "\n";
}

}  // namespace ep_runtime

// All lines of a struct: EP_STRUCT_LINES(EpText, data, size).
#define EP_STRUCT_LINES(type, ...) \
  (::ep_runtime::SizeLine<type>(#type) EP_EXPAND_4(EP_FIELD_LINES(type, __VA_ARGS__)))
#define EP_FIELD_LINES(type, field, ...)                                                   \
  +::ep_runtime::FieldLine<decltype(type::field)>(#type "." #field, offsetof(type, field)) \
      __VA_OPT__(EP_MORE_LINES EP_NOTHING()()(type, __VA_ARGS__))
// A macro does not expand itself: each pass of EP_EXPAND_4 takes one more field, 81 at most.
#define EP_MORE_LINES() EP_FIELD_LINES
#define EP_NOTHING()
#define EP_EXPAND_4(...) EP_EXPAND_3(EP_EXPAND_3(EP_EXPAND_3(__VA_ARGS__)))
#define EP_EXPAND_3(...) EP_EXPAND_2(EP_EXPAND_2(EP_EXPAND_2(__VA_ARGS__)))
#define EP_EXPAND_2(...) EP_EXPAND_1(EP_EXPAND_1(EP_EXPAND_1(__VA_ARGS__)))
#define EP_EXPAND_1(...) EP_EXPAND_0(EP_EXPAND_0(EP_EXPAND_0(__VA_ARGS__)))
#define EP_EXPAND_0(...) __VA_ARGS__

#endif  // EP_RUNTIME_FFI_STRUCT_LINES_H_
