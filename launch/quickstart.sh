#!/usr/bin/env bash
# From nothing to a pretrained small model: corpus, tokenizer, pretraining on two ranks with subnets that grow
# (EST) and without, and what that saved. Under eight minutes on two CPU cores once installed.
# Arguments go to both pretraining commands, e.g. launch/quickstart.sh --training.train_iters 20
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

"$PYTHON" tools/plot_run.py --log-dir "$out/checkpoint/logs"
step "done"
"$PYTHON" tools/compare_runs.py "dense=$out/dense/logs" "EST=$out/checkpoint/logs"
echo "checkpoint: $out/checkpoint   logs: $out/checkpoint/logs (metrics.jsonl, loss.png, tensorboard/)"
echo "The same command continues from the checkpoints; a longer run: launch/quickstart.sh --training.train_iters 400"
