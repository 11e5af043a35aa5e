# SPDX-License-Identifier: Apache-2.0
"""From chats to batches: what the drafter learns from.

In reading order:

- where rows come from: `addresses` (which hold no credentials), `sources` (files, wherever fsspec finds them),
  `json_rows` (one a line, or a list of them), `chat_messages`, `chat_rows` (rows of many makes become chats);
- from a chat to documents, token ids with supervised spans: `answers`, `documents`, `rendering` (by the target's own
  chat template), `conversations` (in memory);
- to a folder of documents, resumable: `shards`, `tokenizing` (one file), `tokenize_workers` (by several
  processes), `tokenize_job` (all files), `manifest`, `preparation_report` (what a person looks at afterwards);
- to tensors: `loading` (one call for training data, tokenised already or not), `document_checks`, `packing` (documents
  to rows), `anchors` (which are drawn), `collator` (rows to tensors).
"""
