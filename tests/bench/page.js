// The page's side: when was a key pressed, and when did the new picture stand on the screen?
window.bench = (() => {
  const image = () => document.querySelector('.widget-interact .jp-RenderedImage img')
  const canvas = () => document.querySelector('.lk-canvas')
  const forms = {
    ours: { root: '.lk-picture', place: canvas, state: () => canvas().dataset.seq,
      slider: control => document.querySelector(`.lk-control[data-name="${control.name}"] input[type=range]`),
      move: (slider, step) => { slider.value = +slider.value + step; slider.dispatchEvent(new Event('input')) } },
    naive: { root: '.widget-interact', place: image, state: () => image()?.src,
      slider: control => document.querySelectorAll('.widget-interact .noUi-handle')[control.place],
      move: (slider, step) => slider.dispatchEvent(new KeyboardEvent('keydown', { key: step > 0 ? 'ArrowRight' : 'ArrowLeft' })) },
  }
  const frame = () => new Promise(requestAnimationFrame)
  const sleep = ms => new Promise(done => setTimeout(done, ms))
  let pressed = 0
  addEventListener('keydown', () => { pressed = performance.now() }, { capture: true })

  // Both forms end alike: the picture is in the page and decoded, and the frame with it has just been painted.
  const painted = () => new Promise(done => { const { port1, port2 } = new MessageChannel(); port1.onmessage = done; port2.postMessage(0) })
  function watch(form, told) {
    let last = forms[form].state()
    const observer = new MutationObserver(async () => {
      const now = forms[form].state()
      if (!now || now === last) return
      last = now
      if (form === 'naive') await image().decode().catch(() => {})  // it was replaced meanwhile
      await frame(); await painted()
      told(performance.now())
    })
    observer.observe(document.querySelector(forms[form].root), { childList: true, subtree: true, attributeFilter: ['data-seq', 'src'] })
    return () => observer.disconnect()
  }

  return {
    // JupyterLab's shortcuts see the arrow keys of neither form; the lab does that itself.
    begin: () => document.querySelector(forms.naive.root).addEventListener('keydown', event => event.stopPropagation()),
    look: form => forms[form].place().scrollIntoView({ block: 'center' }),
    bytes: () => image().src.length * 3 / 4,
    arm: (form, control) => {
      forms[form].slider(control).focus({ preventScroll: true })
      window.waited = new Promise(done => {
        const stop = watch(form, now => { stop(); done(now - pressed) })
        setTimeout(() => { stop(); done(null) }, 5000)
      })
    },
    storm: async (form, control, steps, spacing) => {
      const slider = forms[form].slider(control), times = [], stop = watch(form, now => times.push(now)), began = performance.now()
      for (const [at, step] of steps.entries()) {
        await sleep(began + at * spacing - performance.now())
        forms[form].move(slider, step)
      }
      const last = performance.now()
      while (performance.now() - Math.max(last, times.at(-1) ?? 0) < 2500) await sleep(100)
      stop()
      return { pictures: times.length, 'late ms': times.at(-1) - last, text: document.querySelector('.lk-sentence').textContent }
    },
  }
})()
