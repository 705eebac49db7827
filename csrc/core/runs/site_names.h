// SiteNames: names of call sites that all processes share.
#ifndef EP_RUNTIME_CORE_RUNS_SITE_NAMES_H_
#define EP_RUNTIME_CORE_RUNS_SITE_NAMES_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_set>

#include "core/memory/board.h"

namespace ep_runtime {

// Description of a call site, the same in every process that compiled its program.
struct SiteKind {
  OpCode op;
  uint64_t layer_id;
  uint64_t fingerprint;
  uint32_t handle;
  bool operator<(const SiteKind& other) const {
    return std::tie(op, layer_id, fingerprint, handle) <
           std::tie(other.op, other.layer_id, other.fingerprint, other.handle);
  }
};

// Gives call sites the same names in all processes of a job: by kind, and by how many sites of that
// kind the process compiled before. Processes of a job compile the same programs in the same order;
// if they do not, names differ and the meeting place reports an error. Numbers are never reused,
// because processes may free executables at different times.
class SiteNames {
 public:
  struct Name {
    uint64_t name;
    uint32_t ordinal;
  };
  Name Next(const SiteKind& kind);
  bool Contains(uint64_t name) const;

 private:
  mutable std::mutex mutex_;
  std::map<SiteKind, uint32_t> counts_;
  std::unordered_set<uint64_t> names_;
};

// Mixes a number into a hash of 64 bits.
constexpr uint64_t Mixed(uint64_t hash, uint64_t number) {
  hash = (hash ^ number) + 0x9E3779B97F4A7C15u;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EBu;
  return hash ^ (hash >> 31);
}

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_RUNS_SITE_NAMES_H_
