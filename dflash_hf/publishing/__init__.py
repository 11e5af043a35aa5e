# SPDX-License-Identifier: Apache-2.0
"""From a trained drafter to a repository of the Hub.

In reading order: `training_facts` (what a run knows of itself), `card_results` (what was measured), `card_options`
(what the publisher says), `card_sections` and `model_card` (made of all three, from `model_card_template.md`),
`repository` (the folder with everything that users need), `sending` (to the Hub, in one commit), `hub_pushes` (what
the trainer sends, and when).
"""
