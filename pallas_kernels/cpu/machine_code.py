"""Compiles an emitted kernel to machine code in this process, by LLVM."""

from collections.abc import Callable

import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.values import I64, Value

# Emits what a handler does when XLA calls it.
EmitHandler = Callable[[Emitter, Frame], None]


def compile_handler(name: str, emit: EmitHandler, chip: CpuChip) -> bytes:
    """Returns an object file with a handler for `chip`, which need not be this machine's: a function of that name."""
    target, module = _optimized(name, emit, chip)
    return bytes(target.emit_object(module))


def handler_assembly(name: str, emit: EmitHandler, chip: CpuChip) -> str:
    """Returns the instructions that this object file has, to be read."""
    target, module = _optimized(name, emit, chip)
    return str(target.emit_assembly(module))


def _optimized(name: str, emit: EmitHandler, chip: CpuChip) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(chip.triple).create_target_machine(
        # Addresses of 64 bits. In a process with many mappings, constants may lie more than 2 GiB from the code.
        cpu=chip.name, features=chip.features, opt=3, reloc="static", codemodel="large",
    )  # fmt: skip
    module = llvm.parse_assembly(str(_module(name, emit, chip)))
    module.verify()
    _optimize(module, target)
    return target, module


def _optimize(module: llvm.ModuleRef, target: llvm.TargetMachine) -> None:
    """Puts variables into registers and leaves out what is computed twice.

    The kernels have the vectors and the unrolled loops that they want, and the backend moves what does not change out
    of loops.
    """
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_new_gvn_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))


def _module(name: str, emit: EmitHandler, chip: CpuChip) -> ir.Module:
    module = ir.Module(name)
    module.triple = chip.triple
    function = ir.Function(module, ir.FunctionType(I64, [I64]), name)
    e = Emitter(function, chip)
    frame = Frame(e, Value(e, function.args[0]))
    frame.answer_metadata()
    with e.when(frame.executes):
        emit(e, frame)
    e.builder.ret(ir.Constant(I64, 0))  # no error
    return module
