# SPDX-License-Identifier: Apache-2.0
"""What `generation.py` and `acceptance.py` are made of: decoding with a drafter, and measuring it.

In reading order:

- one prompt: `checks` (what is refused), `state` (what target and drafter remember), `sampling` (how drafts are
  proposed and verified);
- measuring: `walk` (teacher-forced, without decoding), `prompts` (what to decode), `plain_answers` (of the target
  alone), `report`, `report_files` (tables and plots);
- servers (vLLM, SGLang): `server_http`, `server_counters`, `server_answers`, `server_client`, `serving` (their
  acceptance length), `completion_client` (their answers, to train on).
"""
