#!/usr/bin/env bash
# From nothing to a pretrained small model: corpus, tokenizer, pretraining on two ranks with subnets that grow
# (EST) and without, and what that saved; then pretraining, fine-tuning and GRPO on a task with a verifier.
# Under twenty minutes on two CPU cores once installed.
# Arguments go to the first two pretraining commands, e.g. launch/quickstart.sh --training.train_iters 20
# SHORT=1: a few steps of the task's stages, to see that they run.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out="${OUT:-runs/quickstart}"
source_text="${CORPUS:-python_stdlib}"
began=$SECONDS

step() { echo; echo "== [$((SECONDS - began)) s] $*"; }

step "corpus: the text of $source_text"
"$PYTHON" tools/prepare_corpus.py --source "$source_text" --output-dir "$out/corpus"

step "tokenizer: SentencePiece BPE of 4096 pieces"
if [ ! -e "$out/tokenizer.model" ]; then
    "$PYTHON" tools/train_tokenizer.py --input "$out/corpus/train.jsonl" --vocab-size 4096 \
        --output-prefix "$out/tokenizer" --max-bytes 4000000 --num-threads 2
fi

step "token files"
for split in train valid; do
    if [ ! -e "$out/${split}_text_document.idx" ]; then
        "$PYTHON" tools/preprocess_data.py --input "$out/corpus/$split.jsonl" \
            --output-prefix "$out/$split" --tokenizer-type SentencePieceTokenizer \
            --tokenizer-model "$out/tokenizer.model" --append-eod --workers 2
    fi
done

pretrain() {
    local folder="$1"
    shift
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$PYTHON" -m torch.distributed.run --standalone \
        --nproc_per_node 2 -m megatron_tlt.pretrain --config examples/quickstart.yaml \
        --tokenizer.tokenizer_model "$out/tokenizer.model" \
        --data.train_data_path "[\"$out/train_text_document\"]" \
        --data.valid_data_path "[\"$out/valid_text_document\"]" \
        --checkpoint.save "$folder" --checkpoint.load "$folder" "$@"
}

step "pretraining with EST on two ranks: a subnet that grows to the full model"
pretrain "$out/checkpoint" "$@"

step "the same without EST, to compare"
pretrain "$out/dense" "$@" --est.schedule dense

# From here on a task with a verifier: countdown, whose answers are searches of very unequal length.
task="$out/countdown"
ranks() {
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$PYTHON" -m torch.distributed.run --standalone \
        --nproc_per_node 2 -m "$@"
}

pretrain_short=() sft_short=() grpo_short=()
if [ -n "${SHORT:-}" ]; then
    pretrain_short=(--training.train_iters 3 --est.ends "[1, 2]" --optimizer.lr_warmup_iters 1)
    sft_short=(--training.train_iters 3 --optimizer.lr_warmup_iters 1 --optimizer.lr_wsd_decay_iters 1)
    grpo_short=(--training.train_iters 1 --rollout.max_response_len 32 --evaluation.max_prompts 8)
fi

step "countdown: tokenizer, texts, search traces, prompts and held-out problems"
if [ ! -e "$task/data/eval.jsonl" ]; then
    "$PYTHON" tools/prepare_countdown.py --output-dir "$task/data"
    "$PYTHON" tools/preprocess_data.py --input "$task/data/pretrain.jsonl" \
        --output-prefix "$task/data/pretrain" --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model "$task/data/tokenizer" --append-eod --workers 2
fi

step "countdown: pretraining with EST on right arithmetic without targets"
ranks megatron_tlt.pretrain --config examples/pretrain_countdown_cpu.yaml \
    --tokenizer.tokenizer_model "$task/data/tokenizer" \
    --data.train_data_path "[\"$task/data/pretrain_text_document\"]" \
    --checkpoint.save "$task/pretrain" --checkpoint.load "$task/pretrain" "${pretrain_short[@]}"

step "countdown: fine-tuning on search traces"
ranks megatron_tlt.sft --config examples/sft_countdown_cpu.yaml \
    --pretrained_checkpoint "$task/pretrain" --data.train_data_path "[$task/data/sft.jsonl]" \
    --checkpoint.save "$task/sft" --checkpoint.load "$task/sft" "${sft_short[@]}"

step "countdown: GRPO, evaluated on held-out problems before and after"
ranks megatron_tlt.rl --config examples/grpo_countdown_cpu.yaml \
    --pretrained_checkpoint "$task/sft" --data.prompt_data "[$task/data/rl.jsonl]" \
    --evaluation.sets "{countdown: [$task/data/eval.jsonl]}" \
    --checkpoint.save "$task/grpo" --checkpoint.load "$task/grpo" "${grpo_short[@]}"

step "done"
"$PYTHON" tools/compare_runs.py "dense=$out/dense/logs" "EST=$out/checkpoint/logs"
"$PYTHON" -m megatron_tlt.report "$out" --figures "$task/figures.json"
echo "report: $out/report/report.html   checkpoints: $out/checkpoint, $task/grpo   logs: their logs/"
echo "The same command continues from the checkpoints; a longer run: launch/quickstart.sh --training.train_iters 400"
