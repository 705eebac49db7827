// Holds meetings of one rank on lanes, by commands of standard input:
//
//   join CALL | leave CALL | fail CALL
//
// After each command prints the calls that hold a lane, in ascending order. The number of lanes
// comes first.
#include <atomic>
#include <cstdint>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "core/meeting/meeting.h"

using namespace ep_runtime;

int main() {
  uint32_t lanes;
  std::cin >> lanes;
  const size_t bytes = sizeof(Control) + lanes * (sizeof(Lane) + sizeof(PhaseWord)) +
                       kMeetingSlots * (sizeof(uint32_t) + sizeof(MeetingSlot));
  std::vector<Control> board(bytes / sizeof(Control) + 1);  // zeros, like a new board
  board[0].ranks = 1;
  board[0].lanes = lanes;
  const Word64 poison{0};
  MeetingPlace place(reinterpret_cast<uint8_t*>(board.data()), PoisonWatch{&poison, 1});

  std::map<uint64_t, MeetingSlot*> open;
  std::string order;
  for (uint64_t call; std::cin >> order >> call;) {
    if (order == "join") {
      CallTag tag{};
      tag.key.call = call;
      tag.op = OpCode::kDispatch;
      if (!place.Join(tag, 0, Verdict{}, &open[call]).ok()) return 1;
    } else {
      place.Leave(open.at(call), order == "fail");
      open.erase(call);
    }
    for (const auto& [number, slot] : open) {
      if (slot->state == kSlotGranted && place.lane(slot->lane).epoch == slot->epoch) {
        std::cout << number << " ";
      }
    }
    std::cout << "\n";
  }
}
