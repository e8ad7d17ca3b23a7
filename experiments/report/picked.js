// Shows the clicked example below the map; textContent, so nothing in it is markup.
const index = source.selected.indices[0];
const box = document.getElementById("picked");
if (box && index !== undefined) {
  const data = source.data;
  const line = document.createElement("p");
  line.textContent = `Example ${data.id[index]} · ${data.source[index]} · ` +
    `${data.cluster[index]} · ${data.state[index]} · loss ` +
    `${data.loss[index].toFixed(3)} nats · gradient norm ` +
    `${data.norm[index].toPrecision(3)} · ${data.labels[index]} label tokens`;
  const prompt = document.createElement("pre");
  prompt.textContent = data.prompt[index];
  const answer = document.createElement("pre");
  answer.className = "answer";
  answer.textContent = data.answer[index];
  box.replaceChildren(line, prompt, answer);
}
