"""What the networks and optimizers compute in different ways on different hardware.

`ops` has every such operation in plain XLA, and what CPUs and TPUs override. `gpu_ops` overrides what our kernels, or
XLA with other shapes, compute faster on GPUs. `choice` picks the class for the devices of the current trace.
`attention_inputs` describes the mask and the bias of attention. The other modules are the kernels, which import Pallas
and are loaded when needed.
"""
