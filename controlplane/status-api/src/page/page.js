"use strict";
// Replaces the parts of the sheet that change. Everything works without it, after a reload.
const main = document.getElementById("main");
const state = document.getElementById("live");
if (main.dataset.live) {
  const stream = new EventSource("live?sheet=" + encodeURIComponent(main.dataset.live));
  stream.onopen = () => { state.textContent = "live"; };
  stream.onerror = () => { state.textContent = "not live: the connection is lost, trying again"; };
  stream.addEventListener("ended", (event) => { state.textContent = event.data; stream.close(); });
  stream.addEventListener("section", (event) => {
    const [id, html] = JSON.parse(event.data);
    const section = document.getElementById(id);
    if (!section || section.contains(document.activeElement) && section.querySelector("form")) return;
    const at = section.querySelector(":focus");
    const href = at && at.getAttribute("href");
    const kept = [...section.querySelectorAll(".scroll,pre")].map((box) => box.scrollLeft);
    section.innerHTML = html;
    [...section.querySelectorAll(".scroll,pre")].forEach((box, i) => { box.scrollLeft = kept[i] || 0; });
    if (href) [...section.querySelectorAll("a")].find((a) => a.getAttribute("href") === href)?.focus();
  });
}
