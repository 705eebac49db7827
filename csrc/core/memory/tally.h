// Layout of a rank's tally on the board: times of its calls, waits for peers, and load.
// `ep_runtime/board.py` repeats the arithmetic.
#ifndef EP_RUNTIME_CORE_MEMORY_TALLY_H_
#define EP_RUNTIME_CORE_MEMORY_TALLY_H_

#include <cstdint>

#include "core/memory/board.h"
#include "core/memory/layout.h"

namespace ep_runtime {

// ops [kTallyOps] OpRecord, peers [kTallyOps][N] PeerRecord, loads [kMaxLoads]; each load is a
// LoadRecord followed by L words of rows.
struct TallyLayout {
  int64_t peers_offset;
  int64_t loads_offset;
  int64_t load_bytes;
  int64_t tally_bytes;  // whole pages, because devices map them

  explicit TallyLayout(const GroupSizes& sizes) {
    peers_offset = kTallyOps * sizeof(OpRecord);
    loads_offset =
        AlignUp(peers_offset + kTallyOps * sizes.ep_size * static_cast<int64_t>(sizeof(PeerRecord)),
                kLineBytes);
    load_bytes = AlignUp(sizeof(LoadRecord) + sizes.experts_per_rank() * 8, kLineBytes);
    tally_bytes = AlignUp(loads_offset + kMaxLoads * load_bytes, kPageBytes);
  }
};

// The tally of one rank that this process drives. Calls of a rank may overlap, so all writes are
// atomic additions, without a lock.
class RankTally {
 public:
  RankTally(uint8_t* start, const GroupSizes& sizes)
      : start_(start), ranks_(sizes.ep_size), experts_(sizes.experts_per_rank()), layout_(sizes) {}

  // Adds how much later than this rank EP rank `source` joined.
  void AddArrival(OpCode op, int64_t source, int64_t arrival_ns) {
    Add(&Peer(op, source).arrival_ns, arrival_ns);
  }
  // Adds a wait that ended when EP rank `source` joined.
  void AddWait(OpCode op, int64_t source, int64_t wait_ns) {
    Add(&Peer(op, source).wait_ns, wait_ns);
  }
  // Adds a finished call. `index` is the number of the handle's record.
  void AddCall(OpCode op, uint32_t index, int64_t time_ns, int64_t wait_ns) {
    OpRecord& record = reinterpret_cast<OpRecord*>(start_)[static_cast<uint32_t>(op)];
    Add(&record.calls, 1);
    Add(&record.time_ns, time_ns);
    Add(&record.wait_ns, wait_ns);
    Add(&record.times[BucketOf(time_ns)], 1);
    Add(&record.waits[BucketOf(wait_ns)], 1);
    if (index >= kMaxLoads) return;
    LoadRecord& load = Load(index);
    Add(&load.calls, 1);
    Add(&load.time_ns, time_ns);
    Add(&load.wait_ns, wait_ns);
  }
  // Adds the load of a prepare: this rank's tokens, and the rows [L] of its experts.
  void AddLoad(uint32_t index, int64_t tokens, const int64_t* rows) {
    if (index >= kMaxLoads) return;
    LoadRecord& load = Load(index);
    Add(&load.tokens, tokens);
    auto* words = reinterpret_cast<Word64*>(&load + 1);
    for (int64_t e = 0; e < experts_; ++e) {
      if (rows[e] != 0) Add(&words[e], rows[e]);
    }
  }

 private:
  static void Add(Word64* word, int64_t value) {
    word->fetch_add(static_cast<uint64_t>(value), std::memory_order_relaxed);
  }
  PeerRecord& Peer(OpCode op, int64_t source) const {
    auto* peers = reinterpret_cast<PeerRecord*>(start_ + layout_.peers_offset);
    return peers[static_cast<int64_t>(op) * ranks_ + source];
  }
  LoadRecord& Load(uint32_t index) const {
    return *reinterpret_cast<LoadRecord*>(start_ + layout_.loads_offset +
                                          index * layout_.load_bytes);
  }

  uint8_t* start_;
  int64_t ranks_;
  int64_t experts_;
  TallyLayout layout_;
};

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_MEMORY_TALLY_H_
