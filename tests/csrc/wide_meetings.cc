// Holds two meetings of all ranks of a mesh at once, and exits with 0 if each is right. The number
// of ranks is the argument.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/meeting/meeting.h"
#include "core/memory/layout.h"

using namespace ep_runtime;

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) {                                            \
      std::printf("%d: %s\n", __LINE__, #condition), std::exit(1); \
    }                                                              \
  } while (false)

int main(int, char** argv) {
  const int ranks = std::atoi(argv[1]);
  const int64_t bytes = ControlBytes(ranks, /*lanes=*/1);
  std::vector<Control> board(bytes / sizeof(Control) + 1);  // zeros, like a new board
  board.back().owner = 1234567;                             // memory after the board
  board[0].ranks = static_cast<uint32_t>(ranks);
  board[0].lanes = 1;
  const Word64 poison{0};
  MeetingPlace place(reinterpret_cast<uint8_t*>(board.data()), PoisonWatch{&poison, 1});

  // Two meetings whose ranks come in opposite orders, in two rounds, so that slots are used again.
  for (int round = 0; round < 2; ++round) {
    std::vector<MeetingSlot*> slots(2);
    for (int i = 0; i < ranks; ++i) {
      for (uint64_t call : {0, 1}) {
        const int rank = call == 0 ? i : ranks - 1 - i;
        CallTag tag{};
        tag.key.call = call;
        tag.op = OpCode::kDispatch;
        CHECK(!(i > 0 && place.Joined(*slots[call], rank)));
        CHECK(place.Join(tag, rank, Verdict{rank, rank, 1}, &slots[call]).ok());
        CHECK(place.Joined(*slots[call], rank));
        CHECK(!place.Join(tag, rank, Verdict{}, &slots[call]).ok());  // a second device
        CHECK(slots[call]->state == (i + 1 < ranks ? kSlotGathering
                                     : call == 0   ? kSlotGranted
                                                   : kSlotQueued));
      }
      CHECK(place.FirstMissing(*slots[0]) == (i + 1 < ranks ? i + 1 : -1));
      CHECK(place.FirstMissing(*slots[1]) == (i + 1 < ranks ? 0 : -1));
    }
    CHECK(slots[0]->verdict_rank == 0 && slots[1]->verdict_rank == 0);
    for (int rank = 0; rank < ranks; ++rank) place.Leave(slots[0], /*failed=*/false);
    CHECK(slots[1]->state == kSlotGranted);
    for (int rank = 0; rank < ranks; ++rank) place.Leave(slots[1], /*failed=*/false);
    CHECK(board[0].open_meetings == 0 && board[0].used_slots == 2);
  }

  // The last slot ends on the board.
  for (uint64_t call = 0; call < kMeetingSlots; ++call) {
    CallTag tag{};
    tag.key.call = call;
    MeetingSlot* slot;
    CHECK(place.Join(tag, ranks - 1, Verdict{}, &slot).ok());
    CHECK(place.FirstMissing(*slot) == (ranks == 1 ? -1 : 0));
  }
  CHECK(board.back().owner == 1234567);
}
