// All-reduce within an XLA program: handlers of XLA's foreign function interface that call NCCL.
//
// `nccl_handlers.py` compiles this file and registers the handlers; `ffi_collectives.py` describes the calls.  The file
// links to neither CUDA nor NCCL: the process has loaded both already, and passes the addresses of their functions in
// `LaunchState`.
//
// XLA calls a handler in the launching thread.  It enqueues NCCL's work on the stream without waiting.  An error does
// not end the launch: the flag `is_valid` of the result stays 0, so that the program returns the old values of its
// donated arrays, and Python reads the error from `LaunchState`.
//
// XLA must not record the calls in a CUDA graph: a replay would read the flag of the epoch that was recorded.

#include <cstdint>
#include <optional>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Stream = void*;

// Mirrored by `LaunchState` in devices/cuda/launch_state.py: int64 throughout, in this order.
struct LaunchState {
  // Set by the connection.  An abort, on another thread, sets comm_handle to 0 first.
  int64_t comm_handle;         // ncclComm_t; 0: not connected
  int64_t valid_flag_address;  // host address of an int32: 1 unless a rank aborts the collectives of this launch
  int64_t side_stream;         // CUstream of reductions that overlap the stream of XLA
  int64_t event;               // CUevent by which one stream waits for the other
  // Addresses of functions.
  int64_t all_reduce_address;  // ncclAllReduce
  int64_t copy_address;        // cuMemcpyAsync
  int64_t fill_address;        // cuMemsetD32Async
  int64_t record_address;      // cuEventRecord
  int64_t wait_address;        // cuStreamWaitEvent
  // State of one launch, reset by Python.
  int64_t is_active;   // whether a launch is in progress
  int64_t n_finished;  // calls of `Finish`
  int64_t has_side_work;
  int64_t failure_kind;  // kAborted, kNccl or kCuda; 0: no error
  int64_t error_code;    // ncclResult_t or CUresult
};

enum FailureKind : int64_t { kAborted = 1, kNccl = 2, kCuda = 3 };

LaunchState* state = nullptr;

// XLA's stream; null where the platform has none, as the CPU, on which tests run.
struct OptionalStream {};

}  // namespace

template <>
struct xla::ffi::CtxDecoding<OptionalStream> {
  using Type = Stream;

  static std::optional<Stream> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx, DiagnosticEngine&) {
    XLA_FFI_Stream_Get_Args args;
    args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    args.extension_start = nullptr;
    args.ctx = ctx;
    args.stream = nullptr;
    if (XLA_FFI_Error* error = api->XLA_FFI_Stream_Get(&args)) {
      internal::DestroyError(api, error);
      return nullptr;
    }
    return args.stream;
  }
};

namespace {

// ncclDataType_t of a dtype; -1 if NCCL has none.
int NcclDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::S8: return 0;
    case ffi::DataType::U8: return 1;
    case ffi::DataType::S32: return 2;
    case ffi::DataType::U32: return 3;
    case ffi::DataType::S64: return 4;
    case ffi::DataType::U64: return 5;
    case ffi::DataType::F16: return 6;
    case ffi::DataType::F32: return 7;
    case ffi::DataType::F64: return 8;
    case ffi::DataType::BF16: return 9;
    default: return -1;
  }
}

// Call a function by its address, unless an earlier call of this launch has failed.
template <typename... Args>
void Call(FailureKind kind, int64_t address, Args... args) {
  if (state->failure_kind) return;
  int result = reinterpret_cast<int (*)(Args...)>(address)(args...);
  if (result != 0) {
    state->failure_kind = kind;
    state->error_code = result;
  }
}

// Make a stream wait for the present work of another one.
void OrderAfter(Stream stream, Stream other) {
  void* event = reinterpret_cast<void*>(state->event);
  Call(kCuda, state->record_address, event, other);
  Call(kCuda, state->wait_address, stream, event, 0u);
}

// Make XLA's stream wait for the reductions that were started, even after an error: they read and write XLA's memory.
void Join(Stream stream) {
  if (!state->has_side_work) return;
  state->has_side_work = 0;
  int64_t failed = state->failure_kind, error = state->error_code;
  state->failure_kind = 0;
  OrderAfter(stream, reinterpret_cast<Stream>(state->side_stream));
  if (failed) {
    state->failure_kind = failed;
    state->error_code = error;
  }
}

// Reduce arguments `first` to `stop` into the results of the same numbers.
void Reduce(ffi::RemainingArgs& args, ffi::RemainingRets& rets, size_t first, size_t stop, int op, Stream stream) {
  int64_t comm = __atomic_load_n(&state->comm_handle, __ATOMIC_ACQUIRE);
  if (comm == 0 && !state->failure_kind) state->failure_kind = kAborted;
  for (size_t i = first; i < stop; i++) {
    ffi::AnyBuffer source = *args.get<ffi::AnyBuffer>(i);
    ffi::AnyBuffer target = **rets.get<ffi::AnyBuffer>(i);
    Call(kNccl, state->all_reduce_address, static_cast<const void*>(source.untyped_data()), target.untyped_data(),
         static_cast<size_t>(source.element_count()), NcclDtype(source.element_type()), op,
         reinterpret_cast<void*>(comm), stream);
  }
}

// Check the call's arguments and results: one result for each argument to reduce, then `is_valid`.
ffi::Error Check(ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  if (state == nullptr || !state->is_active)
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "an all-reduce was called outside of a launch");
  if (rets.size() < 1 || args.size() < rets.size())
    return ffi::Error::InvalidArgument("an all-reduce lacks arguments or results");
  for (size_t i = 0; i + 1 < rets.size(); i++) {
    auto source = args.get<ffi::AnyBuffer>(i);
    auto target = rets.get<ffi::AnyBuffer>(i);
    if (!source.has_value() || !target.has_value() || source->element_type() != (*target)->element_type() ||
        source->element_count() != (*target)->element_count())
      return ffi::Error::InvalidArgument("an all-reduce has a result unlike its argument");
    if (NcclDtype(source->element_type()) < 0) return ffi::Error::InvalidArgument("NCCL has no such dtype");
  }
  auto is_valid = rets.get<ffi::AnyBuffer>(rets.size() - 1);
  if (!is_valid.has_value() || (*is_valid)->element_type() != ffi::DataType::S32 || (*is_valid)->element_count() != 1)
    return ffi::Error::InvalidArgument("an all-reduce has no int32 as its last result");
  return ffi::Error::Success();
}

// Start to reduce arrays on the side stream, behind the present work of XLA's stream.
ffi::Error Start(Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t op, int64_t) {
  if (ffi::Error error = Check(args, rets); error.failure()) return error;
  Stream side = reinterpret_cast<Stream>(state->side_stream);
  OrderAfter(side, stream);
  state->has_side_work = 1;
  Reduce(args, rets, 0, rets.size() - 1, static_cast<int>(op), side);
  return ffi::Error::Success();
}

// Reduce arrays on XLA's stream, make it wait for the first `n_started` arrays, and set `is_valid`.
ffi::Error Finish(Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t op, int64_t n_started) {
  if (ffi::Error error = Check(args, rets); error.failure()) return error;
  size_t n_arrays = rets.size() - 1;
  if (n_started < 0 || static_cast<size_t>(n_started) > n_arrays)
    return ffi::Error::InvalidArgument("an all-reduce has fewer arrays than were started");
  state->n_finished++;
  Join(stream);
  Reduce(args, rets, n_started, n_arrays, static_cast<int>(op), stream);
  // The flag is read when the GPU gets here: a rank sets it to 0, for all ranks, before it aborts the collectives.
  uint64_t flag = reinterpret_cast<uint64_t>((**rets.get<ffi::AnyBuffer>(n_arrays)).untyped_data());
  Call(kCuda, state->copy_address, flag, static_cast<uint64_t>(state->valid_flag_address), size_t{4}, stream);
  if (state->failure_kind)
    reinterpret_cast<int (*)(uint64_t, unsigned, size_t, Stream)>(state->fill_address)(flag, 0u, size_t{1}, stream);
  return ffi::Error::Success();
}

auto Binding() {
  return ffi::Ffi::Bind().Ctx<OptionalStream>().RemainingArgs().RemainingRets().Attr<int64_t>("op").Attr<int64_t>(
      "n_started");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(synkhronos_native_start, Start, Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(synkhronos_native_finish, Finish, Binding());

// Pass the state of the launches that follow.
extern "C" void synkhronos_set_launch_state(LaunchState* next) { state = next; }
