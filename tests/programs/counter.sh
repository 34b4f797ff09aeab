#!/bin/sh
# A program that is not written in Python: counts, and writes the number under another name, which it
# renames.
#     counter.sh FOLDER STEPS
folder=$1
steps=$2

save() {
    echo "step $step" > "$folder/counter.ckpt.tmp"
    mv "$folder/counter.ckpt.tmp" "$folder/counter.ckpt"
}

leave() {
    save
    echo "rank $RANK leaves after step $step"
    exit 0
}

step=0
if [ -e "$folder/counter.ckpt" ]; then
    read -r _ step < "$folder/counter.ckpt"
fi
echo "rank $RANK of $WORLD_SIZE starts at step $step"
trap leave TERM

while [ "$step" -lt "$steps" ]; do
    sleep 0.02
    step=$((step + 1))
    if [ $((step % 5)) -eq 0 ]; then
        save
    fi
done

echo "$step" > "$folder/final.txt"
echo "finished at step $step"
