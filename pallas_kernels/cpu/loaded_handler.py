"""Loads machine code into this process. A start that has all kernels on disk needs nothing that emits or compiles."""

import llvmlite.binding as llvm


class LoadedHandler:
    """A handler in this process, which must live as long as anything may call it."""

    def __init__(self, name: str, code: bytes):
        """Loads the object file `code`, which was compiled for this machine.

        Raises ValueError if it has no function `name`.
        """
        self.code = code
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(reloc="static", codemodel="large")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(name)
        if not self.address:
            raise ValueError(f"the object file has no function {name}: it is the code of another handler")
