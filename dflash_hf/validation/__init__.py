# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM, SGLang, z-lab's `dflash` and transformers will all load a drafter as it was trained.

In reading order: `command` (`dflash-hf validate`), `validate` (all rules, and their report), `checkpoint` (what rules
look at and what they return), `reading` (reads it, without the weights), and the rules: `structure`, `rotary`,
`fields`, `tensors`, `values`.
"""
