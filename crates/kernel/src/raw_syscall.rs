//! System calls without the C library, for processes that share its state (such as errno, which is per thread) with
//! another process.

use std::arch::asm;

/// Makes a system call and returns the kernel's answer; an error is the negated error number.
///
/// # Safety
/// As for the system call itself: pointers must refer to live memory of the right type.
#[cfg(target_arch = "x86_64")]
pub unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the registers follow the kernel's calling convention, which clobbers rcx and r11 in addition to the
    // result.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// Makes a system call and returns the kernel's answer; an error is the negated error number.
///
/// # Safety
/// As for the system call itself: pointers must refer to live memory of the right type.
#[cfg(target_arch = "aarch64")]
pub unsafe fn syscall(number: libc::c_long, args: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the registers follow the kernel's calling convention.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") args[0] as isize => answer,
            in("x1") args[1],
            in("x2") args[2],
            in("x3") args[3],
            in("x4") args[4],
            in("x5") args[5],
            options(nostack),
        );
    }
    answer
}
